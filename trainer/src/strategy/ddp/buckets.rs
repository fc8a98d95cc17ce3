//! Which gradients are reduced together.
//!
//! Source: `torch.distributed._compute_bucket_assignment_by_size` as `DistributedDataParallel` calls it: parameters in
//! reverse registration order (the order in which backward finishes them, roughly), a bucket closes once its size reaches
//! its limit, the first limit is small so that communication starts early.

use std::ops::Range;

use models::ParameterInfo;

/// Gradients that are reduced in one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Parameters, by their place in registration order.
    pub parameters: Range<usize>,
    /// Elements of each.
    pub lengths: Vec<usize>,
    /// Elements of all of them.
    pub elements: usize,
}

/// Cuts the parameters into buckets of at least `first` bytes for the first and `limit` bytes for the others (but for the
/// last), in the order in which they are reduced. Sizes are those of f32.
pub fn assign(parameters: &[ParameterInfo], first: usize, limit: usize) -> Vec<Bucket> {
    let mut buckets = Vec::new();
    let (mut end, mut elements) = (parameters.len(), 0);
    for (index, parameter) in parameters.iter().enumerate().rev() {
        elements += parameter.len();
        let full = if buckets.is_empty() { first } else { limit };
        if elements * size_of::<f32>() >= full || index == 0 {
            let lengths = parameters[index..end].iter().map(ParameterInfo::len).collect();
            buckets.push(Bucket { parameters: index..end, lengths, elements });
            (end, elements) = (index, 0);
        }
    }
    buckets
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
            let buckets = assign(&models::parameters(&network), 1 << 20, 25 << 20);
            let expected = expected.as_array().expect("buckets");
            assert_eq!(buckets.len(), expected.len(), "{name}");
            for (bucket, expected) in buckets.iter().zip(expected) {
                let number = |key: &str| expected[key].as_u64().expect(key) as usize;
                assert_eq!(bucket.parameters.len(), number("params"), "{name}");
                assert_eq!(bucket.elements * 4, number("bytes"), "{name}");
                assert_eq!(bucket.parameters, number("last")..number("first") + 1, "{name}");
            }
            seen += 1;
        }
        assert!(seen >= 5, "{seen} models of the golden file are in the registry");
    }

    #[test]
    fn no_parameters_have_no_bucket() {
        assert_eq!(assign(&[], 1, 1), []);
    }
}
