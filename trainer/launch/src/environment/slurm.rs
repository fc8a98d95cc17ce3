//! Slurm's variables, and its notation for lists of hosts.

use super::variables::{VariableReader, check};
use super::{Candidate, Launcher, WorkerRole};
use crate::error::{LaunchError, Result};

/// Reads srun's variables. Returns `None` if this process is not one of srun's tasks.
pub(super) fn detect(variables: &VariableReader<'_>) -> Result<Option<Candidate>> {
    // In an allocation without srun (salloc), SLURM_PROCID is not set: the shell is not a task.
    let Some(rank) = variables.number("SLURM_PROCID")? else { return Ok(None) };
    let step = variables.owned("SLURM_STEP_ID").or_else(|| variables.owned("SLURM_STEPID"));
    let world_size = match variables.number("SLURM_STEP_NUM_TASKS")? {
        Some(world_size) => world_size,
        None => variables.need("SLURM_NTASKS", "SLURM_PROCID")?,
    };
    // sbatch runs its script once, with the variables of rank 0. Only srun starts the tasks.
    if variables.text("ENVIRONMENT") == Some("BATCH") && step.is_none() {
        if world_size <= 1 {
            return Ok(None);
        }
        return Err(LaunchError::usage(
            format!("SLURM_NTASKS={world_size}, but this process was started by the batch script, not by srun"),
            "start it with srun, which starts every task; or say --launcher local to start workers on this node alone",
        ));
    }
    let local_rank = variables.need("SLURM_LOCALID", "SLURM_PROCID")?;
    let hosts = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"]
        .into_iter()
        .find_map(|name| variables.text(name).map(|list| (name, list)));
    let nodes = match (variables.number("SLURM_STEP_NUM_NODES")?, variables.number("SLURM_NNODES")?, hosts) {
        (Some(nodes), ..) | (None, Some(nodes), _) => nodes,
        (None, None, Some((name, list))) => hosts_in(list).map_err(|cause| bad_list(name, list, &cause))?,
        (None, None, None) => 1,
    };
    let node_rank = variables.number("SLURM_NODEID")?;
    let local_world_size = local_world_size(variables, world_size, nodes, node_rank)?;
    let first = hosts.map(|(name, list)| first_host(list).map_err(|cause| bad_list(name, list, &cause))).transpose()?;
    let id = variables.owned("SLURM_JOB_ID").or_else(|| variables.owned("SLURM_JOBID"));
    let one_host = local_world_size == world_size;
    let role = WorkerRole {
        rank,
        local_rank,
        world_size,
        local_world_size,
        node_rank: node_rank.or(one_host.then_some(0)),
        master_addr: variables
            .owned("MASTER_ADDR")
            // On one host use the loopback: the host's name may resolve to an address that processes on the host cannot use.
            .or_else(|| if one_host { Some("127.0.0.1".to_owned()) } else { first }),
        master_port: variables.port("MASTER_PORT")?,
        job: match (&id, variables.owned("MASTER_PORT")) {
            (None, None) => Vec::new(),
            (_, port) => [Some("slurm".to_owned()), id, step, port].into_iter().flatten().collect(),
        },
        launcher: Launcher::Slurm,
    };
    check(&role, ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "the tasks on this node"])?;
    let evidence = format!("SLURM_PROCID={rank} of SLURM_NTASKS={world_size}");
    Ok(Some(Candidate { role, local_known: true, evidence }))
}

fn bad_list(name: &str, list: &str, cause: &str) -> LaunchError {
    LaunchError::usage(
        format!("{name}={list}: {cause}"),
        "expected something like node[01-04,07],login1; MASTER_ADDR and --launcher env do without it",
    )
}

/// Returns the number of tasks on this node, from srun's counts of all nodes: `2(x3),1`.
fn local_world_size(
    variables: &VariableReader<'_>,
    world_size: usize,
    nodes: usize,
    node_rank: Option<usize>,
) -> Result<usize> {
    if nodes <= 1 {
        return Ok(world_size);
    }
    for name in ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"] {
        let Some(text) = variables.text(name) else { continue };
        let counts = tasks_per_node(text).ok_or_else(|| {
            LaunchError::usage(format!("{name}={text} is not a list of counts"), "expected something like 2(x3),1")
        })?;
        // If a step uses only some of the allocation's tasks, the allocation's counts do not add up to the step's tasks.
        if counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count)) == Some(world_size)
            && let Some(count) = node_rank.and_then(|node| counts.get(node)).or((counts.len() == 1).then(|| &counts[0]))
        {
            return Ok(*count);
        }
    }
    if world_size.is_multiple_of(nodes) {
        return Ok(world_size / nodes);
    }
    Err(LaunchError::usage(
        format!(
            "{world_size} tasks on {nodes} nodes, and SLURM_STEP_TASKS_PER_NODE does not say how many run on this one"
        ),
        "start the tasks with srun --ntasks-per-node",
    ))
}

/// Parses `2(x3),1` to `[2, 2, 2, 1]`.
fn tasks_per_node(text: &str) -> Option<Vec<usize>> {
    /// More nodes than any cluster has. Keeps a damaged `(x…)` from allocating gigabytes.
    const MOST: usize = 1 << 20;
    let mut counts = Vec::new();
    for part in text.split(',') {
        let (count, times) = match part.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        if times > MOST - counts.len() {
            return None;
        }
        counts.extend(std::iter::repeat_n(count.trim().parse::<usize>().ok()?, times));
    }
    Some(counts)
}

/// Returns the first host of a list such as `node[07-09,12],login1`. The error says what is wrong with the list.
pub(super) fn first_host(list: &str) -> std::result::Result<String, String> {
    let first = *entries(list)?.first().ok_or("it is empty")?;
    let mut host = String::new();
    let mut rest = first;
    while let Some((plain, bracket)) = rest.split_once('[') {
        let (inside, tail) = bracket.split_once(']').ok_or("a [ is not closed")?;
        let range = inside.split(',').next().unwrap_or_default();
        let (start, _) = bounds(range)?;
        host += plain;
        host += start;
        rest = tail;
    }
    host += rest;
    Ok(host)
}

/// Counts the hosts of a list.
fn hosts_in(list: &str) -> std::result::Result<usize, String> {
    let mut total = 0usize;
    for entry in entries(list)? {
        let mut hosts = 1usize;
        let mut rest = entry;
        while let Some((_, bracket)) = rest.split_once('[') {
            let (inside, tail) = bracket.split_once(']').ok_or("a [ is not closed")?;
            let mut alternatives = 0usize;
            for range in inside.split(',') {
                let (start, end) = bounds(range)?;
                let number = |text: &str| text.parse::<usize>().map_err(|_| format!("`{text}` is too large"));
                let (start, end) = (number(start)?, number(end)?);
                let count = end.checked_sub(start).ok_or_else(|| format!("`{range}` runs backwards"))?;
                alternatives = alternatives.saturating_add(count.saturating_add(1));
            }
            hosts = hosts.saturating_mul(alternatives);
            rest = tail;
        }
        total = total.saturating_add(hosts);
    }
    Ok(total)
}

/// Splits a list at the commas outside brackets.
fn entries(list: &str) -> std::result::Result<Vec<&str>, String> {
    let (mut entries, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, c) in list.char_indices() {
        match c {
            '[' if inside => return Err("a [ is inside another".into()),
            ']' if !inside => return Err("a ] has no [".into()),
            '[' | ']' => inside = c == '[',
            ',' if !inside => {
                entries.push(list[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("a [ is not closed".into());
    }
    entries.push(list[start..].trim());
    match entries.iter().any(|entry| entry.is_empty()) {
        true => Err("a host's name is empty".into()),
        false => Ok(entries),
    }
}

/// Splits a range: `07-09` → `07`, `09`; `12` → `12`, `12`.
fn bounds(range: &str) -> std::result::Result<(&str, &str), String> {
    let (start, end) = range.split_once('-').unwrap_or((range, range));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if digits(start) && digits(end) { Ok((start, end)) } else { Err(format!("`{range}` is not a range of numbers")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_tasks_are_limited() {
        assert_eq!(tasks_per_node("2(x3),1"), Some(vec![2, 2, 2, 1]));
        for text in ["", "2(x", "1,1(x18446744073709551615)", "1(x2000000)", "a"] {
            assert_eq!(tasks_per_node(text), None, "{text}");
        }
    }
}
