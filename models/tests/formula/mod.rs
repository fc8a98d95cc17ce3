//! Weights and inputs of the references. They come from a formula, so no weight file is needed (`reference/README.md`).

/// Returns `count` values in [0, 1) for the tensor `name`.
fn uniform(name: &str, count: usize) -> impl Iterator<Item = f64> {
    let hash =
        name.bytes().fold(0xCBF2_9CE4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3));
    (1..=count as u64).map(move |i| {
        let z = hash.wrapping_add(i.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let z = z ^ (z >> 31);
        (z >> 40) as f64 / (1u64 << 24) as f64
    })
}

/// Returns the values of the parameter `name`.
pub fn weights(name: &str, shape: &[usize]) -> Vec<f32> {
    let count = shape.iter().product();
    if shape.len() >= 2 {
        let bound = (6.0 / shape[1..].iter().product::<usize>() as f64).sqrt();
        uniform(name, count).map(|u| ((2.0 * u - 1.0) * bound) as f32).collect()
    } else if name.ends_with("weight") {
        uniform(name, count).map(|u| (0.5 + u) as f32).collect()
    } else {
        uniform(name, count).map(|u| ((2.0 * u - 1.0) * 0.1) as f32).collect()
    }
}

/// Returns images of this shape.
pub fn input(name: &str, shape: [usize; 4]) -> Vec<f32> {
    uniform(name, shape.iter().product()).map(|u| 1.7 * (2.0 * u - 1.0) as f32).collect()
}
