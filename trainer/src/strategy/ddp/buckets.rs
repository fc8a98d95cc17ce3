//! Which gradients are reduced together.
//!
//! Source: `torch.distributed._compute_bucket_assignment_by_size` as `DistributedDataParallel` calls it: parameters in
//! the order in which backward finishes them, a bucket closes once its size reaches its limit, the first limit is small
//! so that communication starts early.

use models::ParameterInfo;

/// Gradients that are reduced in one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Parameters, by their place in registration order, in the order in which they lie in the bucket.
    pub parameters: Vec<usize>,
    /// Elements of all of them.
    pub elements: usize,
}

/// Cuts the parameters of these `lengths` (elements, in registration order), taken in `order`, into buckets of at least
/// `first` bytes for the first and `limit` bytes for the others (but for the last). Sizes are those of f32.
pub fn assign(order: &[usize], lengths: &[usize], first: usize, limit: usize) -> Vec<Bucket> {
    let mut buckets = Vec::new();
    let mut open = Bucket { parameters: Vec::new(), elements: 0 };
    for (turn, &index) in order.iter().enumerate() {
        open.parameters.push(index);
        open.elements += lengths[index];
        let full = if buckets.is_empty() { first } else { limit };
        if open.elements * size_of::<f32>() >= full || turn + 1 == order.len() {
            buckets.push(std::mem::replace(&mut open, Bucket { parameters: Vec::new(), elements: 0 }));
        }
    }
    buckets
}

/// Elements of each parameter.
pub fn lengths(parameters: &[ParameterInfo]) -> Vec<usize> {
    parameters.iter().map(ParameterInfo::len).collect()
}

/// The order that PyTorch assumes before it has seen a backward pass: reverse registration.
pub fn assumed_order(count: usize) -> Vec<usize> {
    (0..count).rev().collect()
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use models::Spec;

    use super::*;

    /// `ddp_buckets.json`, computed by PyTorch: for each model its buckets' parameter counts, bytes, first and last index.
    #[test]
    fn buckets_equal_pytorch() {
        let golden: serde_json::Value =
            serde_json::from_str(include_str!("../../../tests/reference/ddp_buckets.json")).expect("golden file");
        let spec = Spec { num_classes: 10, in_channels: 3, image_size: [32, 32] };
        let mut seen = 0;
        for (name, expected) in golden["models"].as_object().expect("models") {
            let Ok(network) = models::build(name, &spec, 0, &Device::flex()) else { continue };
            let lengths = lengths(&models::parameters(&network));
            let buckets = assign(&assumed_order(lengths.len()), &lengths, 1 << 20, 25 << 20);
            let expected = expected.as_array().expect("buckets");
            assert_eq!(buckets.len(), expected.len(), "{name}");
            for (bucket, expected) in buckets.iter().zip(expected) {
                let number = |key: &str| expected[key].as_u64().expect(key) as usize;
                assert_eq!(bucket.parameters.len(), number("params"), "{name}");
                assert_eq!(bucket.elements * 4, number("bytes"), "{name}");
                let in_turn: Vec<usize> = (number("last")..number("first") + 1).rev().collect();
                assert_eq!(bucket.parameters, in_turn, "{name}");
            }
            seen += 1;
        }
        assert!(seen >= 5, "{seen} models of the golden file are in the registry");
    }

    #[test]
    fn buckets_follow_the_order_given() {
        let buckets = assign(&[1, 2, 0, 3], &[10, 20, 30, 40], 80, 400);
        let found: Vec<_> = buckets.iter().map(|b| (b.parameters.as_slice(), b.elements)).collect();
        assert_eq!(found, [(&[1][..], 20), (&[2, 0, 3], 80)]);
        assert_eq!(assign(&[], &[], 1, 1), []);
    }
}
