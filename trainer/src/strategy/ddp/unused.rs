//! Parameters that a step did not use, by name.

use models::ParameterInfo;

/// Warns when the set of unused parameters changes.
#[derive(Debug, Default)]
pub(super) struct Unused {
    last: Option<String>,
}

impl Unused {
    /// `used[rank][parameter]` is not zero where the rank's gradient reached the parameter. `speaks` on one rank alone.
    pub(super) fn report(&mut self, step: u64, used: &[&[u8]], parameters: &[ParameterInfo], speaks: bool) {
        let text = describe(used, parameters);
        if self.last.as_ref() == Some(&text) {
            return;
        }
        if speaks {
            eprintln!("warning: step {step}: {text}");
        }
        self.last = Some(text);
    }
}

fn describe(used: &[&[u8]], parameters: &[ParameterInfo]) -> String {
    let names = |unused: &dyn Fn(usize) -> bool| -> Vec<&str> {
        (0..parameters.len()).filter(|&i| unused(i)).map(|i| parameters[i].name.as_str()).collect()
    };
    let nobody = |index: usize| used.iter().all(|used| used[index] == 0);
    let mut lines = Vec::new();
    let by_nobody = names(&nobody);
    if !by_nobody.is_empty() {
        lines.push(format!("no rank used {}: the optimizer leaves them alone", list(&by_nobody)));
    }
    for (rank, used) in used.iter().enumerate() {
        let here = names(&|index| used[index] == 0 && !nobody(index));
        if !here.is_empty() {
            lines.push(format!("rank {rank} did not use {}: it adds nothing to their gradients", list(&here)));
        }
    }
    lines.join("; ")
}

fn list(names: &[&str]) -> String {
    const SHOWN: usize = 8;
    let shown = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use burn::module::ParamId;

    use super::*;

    #[test]
    fn unused_parameters_are_named_by_rank() {
        let parameters: Vec<_> =
            ["a", "b", "c"].map(|name| ParameterInfo { name: name.into(), shape: vec![1], id: ParamId::new() }).into();
        let text = describe(&[&[1, 0, 0], &[1, 0, 1]], &parameters);
        assert_eq!(
            text,
            "no rank used `b`: the optimizer leaves them alone; rank 0 did not use `c`: it adds nothing to their \
             gradients"
        );
    }
}
