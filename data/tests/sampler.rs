//! The sampler compared with values computed by PyTorch (`reference/`).

use data::sampler::{DistributedSampler, SamplerError, permutation, weighted_draws};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn golden(text: &str) -> Value {
    serde_json::from_str(text).expect("the golden file is JSON")
}

fn shuffled_golden() -> Value {
    golden(include_str!("reference/sampler_shuffled.json"))
}

fn number(value: &Value) -> u64 {
    value.as_u64().expect("a number")
}

fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().expect("a list").iter().map(|n| number(n) as u32).collect()
}

/// Compares every rank of every case with PyTorch, and the interleaved ranks with the global order.
fn check_ranks(cases: &Value, shuffle: bool) {
    let cases = cases.as_array().expect("a list of cases");
    assert!(cases.len() > 10);
    for case in cases {
        let (n, world_size) = (number(&case["n"]) as usize, number(&case["world"]) as usize);
        let (seed, epoch) = if shuffle { (number(&case["seed"]), number(&case["epoch"])) } else { (0, 0) };
        let drop_last = case["drop_last"].as_bool().expect("a flag");
        for rank in 0..world_size {
            let sampler = DistributedSampler::new(n, rank, world_size, shuffle, seed, drop_last).unwrap();
            let indices = sampler.indices(epoch as usize);
            assert_eq!(indices, numbers(&case["ranks"][rank]), "rank {rank} of {case}");
            assert_eq!(indices.len(), sampler.samples_per_rank());
            let order = sampler.global_order(epoch as usize);
            assert_eq!(order.len(), sampler.total_size());
            assert!(indices.iter().enumerate().all(|(i, &sample)| order[i * world_size + rank] == sample));
        }
    }
}

#[test]
fn unshuffled_ranks_equal_pytorch() {
    check_ranks(&golden(include_str!("reference/distributed_sampler.json"))["cases"], false);
}

#[test]
fn shuffled_ranks_equal_pytorch() {
    check_ranks(&shuffled_golden()["shuffled"], true);
}

#[test]
fn permutations_equal_torch_randperm() {
    let golden = shuffled_golden();
    let cases = golden["permutations"].as_array().expect("a list of cases");
    assert_eq!(cases.len(), 42);
    for case in cases {
        let order = permutation(number(&case["n"]) as u32, number(&case["seed"]));
        match case.get("order") {
            Some(expected) => assert_eq!(order, numbers(expected), "{case}"),
            None => check_long(&order, case),
        }
    }
}

/// Compares both ends and the checksum of a long permutation.
fn check_long(order: &[u32], case: &Value) {
    let (first, last) = (numbers(&case["first"]), numbers(&case["last"]));
    assert_eq!(order[..first.len()], first, "{case}");
    assert_eq!(order[order.len() - last.len()..], last, "{case}");
    let mut hash = Sha256::new();
    for chunk in order.chunks(1 << 16) {
        hash.update(chunk.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>());
    }
    let digest: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(Some(digest.as_str()), case["sha256"].as_str(), "{case}");
}

#[test]
fn weighted_draws_equal_pytorchs_weighted_random_sampler() {
    let golden = golden(include_str!("reference/weighted_sampler.json"));
    let cases = golden["cases"].as_array().expect("a list of cases");
    assert_eq!(cases.len(), 36);
    for case in cases {
        let n = number(&case["n"]);
        let weights: Vec<f64> = (0..n).map(|i| ((i * 7919 + 5) % 13) as f64 / 7.0).collect();
        let order = weighted_draws(&weights, number(&case["count"]) as usize, number(&case["seed"]));
        assert!(order.iter().all(|&id| weights[id as usize] > 0.0));
        match case.get("order") {
            Some(expected) => assert_eq!(order, numbers(expected), "{case}"),
            None => check_long(&order, case),
        }
    }
}

/// PyTorch shuffles 214,748,364 samples and more with another algorithm (`make_sampler_golden.py --wide`).
#[test]
#[ignore = "takes 900 MB of memory and a minute"]
fn permutations_on_both_sides_of_the_wide_limit() {
    for line in include_str!("reference/randperm_wide.jsonl").lines() {
        let case = golden(line);
        check_long(&permutation(number(&case["n"]) as u32, number(&case["seed"])), &case);
    }
}

#[test]
fn an_epoch_is_a_permutation_and_epochs_differ() {
    let sampler = DistributedSampler::new(1000, 0, 4, true, 3, false).unwrap();
    let (first, second) = (sampler.global_order(0), sampler.global_order(1));
    assert_ne!(first, second);
    assert_eq!(first, sampler.global_order(0));
    let mut sorted = second;
    sorted.sort_unstable();
    assert!(sorted.iter().copied().eq(0..1000));
}

#[test]
fn impossible_samplers_are_errors_with_a_hint() {
    let new = |len, rank, world_size| DistributedSampler::new(len, rank, world_size, true, 0, false);
    assert_eq!(new(10, 0, 0), Err(SamplerError::EmptyWorld));
    let outside = new(10, 4, 4).unwrap_err();
    assert_eq!(outside, SamplerError::RankOutsideWorld { rank: 4, world_size: 4 });
    assert_eq!(outside.to_string(), "rank 4 is outside a world of 4");
    assert_eq!(outside.hint(), "ranks count from 0: use 0 to 3, or raise the world size");
    let large = 1 + u32::MAX as usize;
    assert_eq!(new(large, 0, 1), Err(SamplerError::TooManySamples { len: large }));
}
