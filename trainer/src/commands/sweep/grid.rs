//! Computes the runs of a sweep: all combinations of the values in the lists of `--set`.

use toml::de::DeValue;

use crate::failure::Failure;

/// Maximum number of runs. A larger number is probably a typing mistake.
const MOST_RUNS: usize = 1000;
/// Hint for a flag of the wrong form.
const EXAMPLE: &str =
    "write it like --set optimizer.lr=0.05,0.1; strings as in TOML: --set 'optimizer.kind=\"sgd\",\"adamw\"'";

/// The settings of a sweep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Grid {
    /// `--set` flags with one value, as the user wrote them. They apply to all runs.
    pub(super) fixed: Vec<String>,
    /// The keys with several values.
    pub(super) keys: Vec<String>,
    /// The values of each run as TOML, in the order of the keys. The last key changes fastest.
    pub(super) runs: Vec<Vec<String>>,
}

impl Grid {
    /// Reads the flags.
    ///
    /// # Errors
    /// A flag is not of the form `key=value,value`, two flags have the same key, a list repeats a value, no key has several
    /// values, or there are too many runs.
    pub(super) fn parse(flags: &[String]) -> Result<Self, Failure> {
        let (mut fixed, mut keys, mut lists) = (Vec::new(), Vec::new(), Vec::new());
        let mut seen = Vec::new();
        for flag in flags {
            let mistake = |cause: &str, hint: &str| Failure::usage(format!("--set {flag}: {cause}"), hint);
            let Some((key, text)) = flag.split_once('=') else {
                return Err(mistake("expected section.key=value,value, found no equals sign", EXAMPLE));
            };
            let key = key.trim();
            if key == "parallel.devices" {
                let hint = "use --cpus or --gpus for all runs together, and --workers-per-run for each";
                return Err(mistake("the sweep assigns the devices", hint));
            }
            if seen.contains(&key) {
                return Err(mistake("the key is set twice", "give all values of a key in one list"));
            }
            seen.push(key);
            let values = values(text).ok_or_else(|| mistake("this is not a list of TOML values", EXAMPLE))?;
            match values.as_slice() {
                [] => return Err(mistake("expected a value, found none", EXAMPLE)),
                [_] => fixed.push(flag.clone()),
                _ => {
                    if let Some(twice) = (1..values.len()).find(|&index| values[..index].contains(&values[index])) {
                        let cause = format!("{} is in the list twice", values[twice]);
                        return Err(mistake(&cause, "repeat a training with a list of seeds: --set train.seed=0,1,2"));
                    }
                    keys.push(key.to_owned());
                    lists.push(values);
                }
            }
        }
        if keys.is_empty() {
            return Err(Failure::usage("nothing to sweep: no --set has a list of several values", EXAMPLE));
        }
        let count = lists.iter().try_fold(1, |product: usize, list| product.checked_mul(list.len()));
        if count.is_none_or(|count| count > MOST_RUNS) {
            let shown = lists.iter().map(|list| list.len().to_string()).collect::<Vec<_>>().join(" x ");
            let cause = format!("{shown} runs are more than {MOST_RUNS}");
            return Err(Failure::usage(cause, "shorten the lists, or sweep one key after the other"));
        }
        let mut runs = vec![Vec::new()];
        for list in &lists {
            let with = |run: &Vec<String>| {
                list.iter().map(|value| [run.as_slice(), std::slice::from_ref(value)].concat()).collect()
            };
            runs = runs.iter().flat_map(|run| -> Vec<Vec<String>> { with(run) }).collect();
        }
        Ok(Self { fixed, keys, runs })
    }
}

/// Splits a list without brackets into the text of each value. Returns `None` if the list is not valid TOML. Accepts a single
/// word without quotes as a value, as `trainer --set` does.
fn values(text: &str) -> Option<Vec<String>> {
    let list = format!("[{text}]");
    match DeValue::parse(&list) {
        Ok(parsed) => {
            let parsed = parsed.into_inner();
            let elements = parsed.as_array()?;
            elements.iter().map(|element| list.get(element.span()).map(|text| text.trim().to_owned())).collect()
        }
        Err(_) if text.contains([',', '"', '\'', '[', '{']) => None,
        Err(_) => Some(vec![text.trim().to_owned()]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(flags: &[&str]) -> Result<Grid, Failure> {
        Grid::parse(&flags.iter().map(|flag| (*flag).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn the_runs_are_the_product_of_the_lists() {
        let grid = parse(&["optimizer.lr=0.05, 0.1", "train.epochs=2", "optimizer.kind=\"sgd\",\"adamw\""]).unwrap();
        assert_eq!(
            (grid.fixed, grid.keys),
            (vec!["train.epochs=2".into()], vec!["optimizer.lr".into(), "optimizer.kind".into()])
        );
        let runs = [["0.05", "\"sgd\""], ["0.05", "\"adamw\""], ["0.1", "\"sgd\""], ["0.1", "\"adamw\""]];
        assert_eq!(grid.runs, runs.map(|run| run.map(str::to_owned).to_vec()));
    }

    #[test]
    fn values_may_have_commas_inside() {
        let grid = parse(&[r#"data.augment=["crop", "flip"],[]"#, "data.name=fashion-mini", r#"model.name="a,b","c""#])
            .unwrap();
        assert_eq!(grid.fixed, ["data.name=fashion-mini"]);
        assert_eq!(grid.runs[1], [r#"["crop", "flip"]"#, r#""c""#]);
        assert_eq!(grid.runs.len(), 4);
    }

    #[test]
    fn mistakes_name_the_flag() {
        let many = (0..1001).map(|seed| seed.to_string()).collect::<Vec<_>>().join(",");
        for (flags, cause) in [
            (&[][..], "nothing to sweep"),
            (&["optimizer.lr=0.1"], "nothing to sweep"),
            (&["optimizer.lr"], "--set optimizer.lr: expected section.key=value,value"),
            (&["optimizer.lr="], "--set optimizer.lr=: expected a value"),
            (&["optimizer.kind=sgd,adamw"], "not a list of TOML values"),
            (&["optimizer.kind=\"sgd,adamw"], "not a list of TOML values"),
            (&["train.seed=1,2", "train.seed=3,4"], "twice"),
            (&["train.seed=1,2,1"], "1 is in the list twice"),
            (&["parallel.devices=\"cpus:1\",\"cpus:2\""], "the sweep assigns the devices"),
            (&[&format!("train.seed={many}")], "1001 runs are more than 1000"),
        ] {
            let failure = parse(flags).unwrap_err();
            assert!(failure.message.contains(cause) && failure.code == 2 && failure.hint.is_some(), "{failure}");
        }
    }
}
