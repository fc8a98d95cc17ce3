//! Synchronous SGD by hand, from PyTorch's tutorial "Writing Distributed Applications with PyTorch":
//! `trainer launch --cpus 2 -- target/release/examples/distributed_sgd`. A logistic regression on points of two overlapping
//! clouds replaces the tutorial's network on MNIST. `average_gradients` is the step that makes it distributed.

mod tutorial;

const SAMPLES: usize = 2048;
const FEATURES: usize = 8;
const GLOBAL_BATCH: usize = 128;
const EPOCHS: usize = 10;
const LEARNING_RATE: f32 = 0.5;

/// A generator with the same numbers on all ranks: SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
/// Generators, 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number from -1 to 1.
    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// A permutation of `0..len` (Fisher and Yates).
    fn permutation(&mut self, len: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..len).collect();
        (1..len).rev().for_each(|last| all.swap(last, (self.next() % (last as u64 + 1)) as usize));
        all
    }
}

/// A sample with its class, 0 or 1.
struct Sample {
    features: [f32; FEATURES],
    class: f32,
}

fn samples(random: &mut Random) -> Vec<Sample> {
    let sample = |index: usize| {
        let class = (index % 2) as f32;
        let features = std::array::from_fn(|_| 2.0 * random.uniform() + 0.6 * (class - 0.5));
        Sample { features, class }
    };
    (0..SAMPLES).map(sample).collect()
}

/// The tutorial's `DataPartitioner`: a shuffled share of the samples for each rank, the same division on all ranks.
fn partition(random: &mut Random, rank: usize, size: usize) -> Vec<usize> {
    let all = random.permutation(SAMPLES);
    all.chunks(SAMPLES.div_ceil(size)).nth(rank).unwrap_or_default().to_vec()
}

/// Weights and bias.
struct Model {
    weight: [f32; FEATURES],
    bias: [f32; 1],
}

impl Model {
    /// Returns the sum of the losses (negative log likelihood), and the mean gradients of weights and bias.
    fn backward(&self, batch: &[&Sample]) -> (f32, [f32; FEATURES], [f32; 1]) {
        let (mut loss, mut weight, mut bias) = (0.0, [0.0; FEATURES], [0.0]);
        for sample in batch {
            let logit: f32 = self.weight.iter().zip(&sample.features).map(|(w, x)| w * x).sum::<f32>() + self.bias[0];
            let sign = 2.0 * sample.class - 1.0;
            // ln(1 + e^-x) and its slope
            loss += (-sign * logit).exp().ln_1p();
            let slope = -sign / (1.0 + (sign * logit).exp()) / batch.len() as f32;
            weight.iter_mut().zip(&sample.features).for_each(|(w, x)| *w += slope * x);
            bias[0] += slope;
        }
        (loss, weight, bias)
    }
}

fn main() -> tutorial::Result {
    let group = tutorial::join()?;
    let (rank, size) = (group.rank(), group.world_size());
    let mut random = Random(1234);
    let data = samples(&mut random);
    let share = partition(&mut random, rank, size);
    let batch_size = (GLOBAL_BATCH / size).max(1);
    let mut model = Model { weight: [0.0; FEATURES], bias: [0.0] };
    for epoch in 0..EPOCHS {
        let mut epoch_loss = 0.0;
        let batches = share.chunks_exact(batch_size);
        let count = batches.len();
        for batch in batches {
            let batch: Vec<&Sample> = batch.iter().map(|index| &data[*index]).collect();
            let (loss, mut weight, mut bias) = model.backward(&batch);
            epoch_loss += loss / batch.len() as f32;
            group.average_gradients(&mut [&mut weight, &mut bias])?;
            model.weight.iter_mut().zip(&weight).for_each(|(w, gradient)| *w -= LEARNING_RATE * gradient);
            model.bias[0] -= LEARNING_RATE * bias[0];
        }
        tutorial::print(format_args!("Rank {rank}, epoch {epoch}: {}", epoch_loss / count as f32))?;
    }
    // All ranks have taken the same steps, so they have the same weights
    let mut mine: Vec<f32> = model.weight.to_vec();
    mine.extend(model.bias);
    let mut all = vec![0.0; mine.len() * size];
    group.all_gather(&mine, &mut all)?;
    if all.chunks_exact(mine.len()).any(|theirs| theirs != mine) {
        return Err("the ranks' weights differ".into());
    }
    Ok(())
}
