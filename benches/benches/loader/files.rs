//! JPEG files of 500x375 pixels, decoded, cropped and resized to 224x224 by one thread, beside torchvision's DataLoader.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use data::augment::Augment;
use data::formats::{DecodePolicy, LoadRequest, load};
use data::loader::{Loader, LoaderConfig};

#[path = "../../../data/testing/pictures.rs"]
mod pictures;

const IMAGES: u32 = 256;
const ROUNDS: usize = 9;
const BATCH: usize = 32;
const SIDE: usize = 224;

/// Measures the loader, and torchvision's with `python`, in turn. Prints medians.
///
/// # Errors
/// The files cannot be written or read, or Python fails.
pub fn measure(python: Option<&str>) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let bytes = write_images(folder.path())?;
    let request = LoadRequest {
        name: "image-folder".into(),
        dir: Some(folder.path().to_owned()),
        image_size: Some(SIDE),
        decode: DecodePolicy::Epoch,
        ..LoadRequest::default()
    };
    let splits = load(&request)?;
    let config = LoaderConfig {
        global_batch: BATCH,
        augment: vec![Augment::RandomResizedCrop { scale: 0.08 }, Augment::Flip],
        mean: vec![0.485, 0.456, 0.406],
        std: vec![0.229, 0.224, 0.225],
        prefetch: 4,
        ..LoaderConfig::default()
    };
    let loader = Loader::new(Arc::new(splits.train), config)?;
    let mut peer = python.map(|python| Peer::start(python, folder.path())).transpose()?;
    let (mut own, mut others) = (Vec::new(), Vec::new());
    // Round 0 warms up caches and is not counted.
    for round in 0..=ROUNDS {
        let rate = super::images_per_second(&loader, round, IMAGES as usize / BATCH);
        let other = peer.as_mut().map(Peer::round).transpose()?;
        if round > 0 {
            own.push(rate);
            others.extend(other);
        }
    }
    println!(
        "{IMAGES} JPEG files of 500x375 pixels, {} KB each, one thread, random-resized-crop {SIDE}, flip",
        bytes / 1000
    );
    println!("{:<24} {:>10} {:>10} {:>10}", "loader", "images/s", "slowest", "fastest");
    for (name, mut rates) in [("trainer", own), ("torchvision and PIL", others)] {
        rates.sort_by(f64::total_cmp);
        if let (Some(slowest), Some(fastest)) = (rates.first(), rates.last()) {
            println!("{name:<24} {:>10.0} {slowest:>10.0} {fastest:>10.0}", rates[rates.len() / 2]);
        }
    }
    Ok(())
}

/// Writes the images to train on, and one to test. Returns the mean size of a file in bytes.
fn write_images(folder: &Path) -> Result<usize, Box<dyn Error>> {
    let mut bytes = 0;
    for (split, count) in [("train", IMAGES), ("test", 1)] {
        let class = folder.join(split).join("all");
        std::fs::create_dir_all(&class)?;
        for index in 0..count {
            // Waves and a little noise: the file is about as large as a photograph of ImageNet.
            let wave = |x: u32, y: u32, period: f32| ((x as f32 + 0.3 * y as f32 + (7 * index) as f32) / period).sin();
            let noise = |x: u32, y: u32| (x.wrapping_mul(2_654_435_761) ^ y.wrapping_mul(2_246_822_519)) >> 27;
            let pixel = |x, y| {
                let light = 110.0 + 60.0 * wave(x, y, 40.0) + 25.0 * wave(y, x, 3.0) + noise(x, y) as f32;
                [light as u8, (light * 0.8) as u8, (light * 0.5 + 40.0 * wave(x, y, 90.0) + 45.0) as u8]
            };
            let color = jpeg_encoder::ColorType::Rgb;
            let file = pictures::jpeg_of(500, 375, &pictures::rgb(500, 375, pixel), color, |encoder| {
                encoder.set_sampling_factor(jpeg_encoder::SamplingFactor::R_4_2_0);
            });
            bytes += file.len();
            std::fs::write(class.join(format!("{index:04}.jpg")), file)?;
        }
    }
    Ok(bytes / (IMAGES as usize + 1))
}

/// torchvision's DataLoader in a process that waits between rounds.
struct Peer {
    child: Child,
    orders: ChildStdin,
    rates: BufReader<ChildStdout>,
}

impl Peer {
    fn start(python: &str, folder: &Path) -> Result<Self, Box<dyn Error>> {
        let program = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/loader.py");
        let mut command = Command::new(python);
        command.arg(program).arg("--files").arg(folder.join("train")).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let (orders, rates) = (child.stdin.take(), child.stdout.take());
        let missing = "Python has no pipe";
        Ok(Self { child, orders: orders.ok_or(missing)?, rates: BufReader::new(rates.ok_or(missing)?) })
    }

    /// Runs an epoch and returns the images per second.
    fn round(&mut self) -> Result<f64, Box<dyn Error>> {
        self.orders.write_all(b"epoch\n")?;
        let mut line = String::new();
        self.rates.read_line(&mut line)?;
        line.trim().parse().map_err(|_| format!("peers/loader.py has written {line:?}, not images per second").into())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
