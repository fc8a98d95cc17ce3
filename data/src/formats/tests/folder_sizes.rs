//! The sizes of images in folders: they must agree, and are compared before pixels take memory.

use super::folder::Folder;
use super::{load, request};
use crate::pictures::save_png;

#[test]
fn sizes_must_agree_unless_resized() {
    let folder = Folder::new();
    save_png(folder.path("train/dog/2.png"), 8, 6, |_, _| [50, 60, 70]);
    assert_eq!(folder.error(), "train/dog/2.png: is 8x6 pixels, the first image is 4x3");
    let mut request = request("image-folder", folder.0.path());
    request.image_size = Some(5);
    let set = load(&request).unwrap().train;
    assert_eq!((set.shape.to_string(), set.len()), ("3x5x5".to_owned(), 3));
    assert_eq!(set.image(2), [[50; 25], [60; 25], [70; 25]].concat());
    for size in [0, 1_000_000] {
        request.image_size = Some(size);
        assert_eq!(load(&request).unwrap_err().cause, format!("image_size is {size}"));
    }
}

#[test]
fn a_forged_size_allocates_nothing() {
    let folder = Folder::new();
    let png = header(&folder, 60_000);
    std::fs::write(folder.path("train/dog/2.png"), &png).unwrap();
    assert!(folder.error().starts_with("train/dog/2.png: cannot be decoded: "), "{}", folder.error());
    // As the first image it would determine the size of all images.
    std::fs::write(folder.path("train/cat/1.png"), &png).unwrap();
    assert!(folder.error().starts_with("train/cat/1.png: "), "{}", folder.error());
}

/// The second image is as large as the format allows. Decoding it before its size is compared would take 0.8 GB.
#[test]
fn sizes_are_compared_before_anything_is_decoded() {
    let folder = Folder::new();
    for (first, name) in [(false, "train/dog/2.png"), (true, "train/cat/0.png")] {
        std::fs::write(folder.path(name), header(&folder, 16_000)).unwrap();
        let error = folder.error();
        // The pixels are missing: whatever decodes them fails with another message.
        let expected = if first {
            "train/cat/1.png: is 4x3 pixels, the first image is 16000x16000"
        } else {
            "train/dog/2.png: is 16000x16000 pixels, the first image is 4x3"
        };
        assert_eq!(error, expected);
    }
}

#[test]
fn images_that_do_not_fit_into_memory_are_counted_first() {
    let folder = Folder::new();
    for (class, index) in (0..400).map(|index| (["cat", "dog"][index % 2], index)) {
        std::fs::write(folder.path(&format!("train/{class}/{index}.png")), header(&folder, 16_000)).unwrap();
    }
    for name in ["train/cat/1.png", "train/dog/1.png", "test/cat/1.png", "test/dog/1.png"] {
        std::fs::write(folder.path(name), header(&folder, 16_000)).unwrap();
    }
    let error = folder.load().unwrap_err();
    assert!(error.cause.starts_with("403 images of 3x16000x16000 need 288.2 GiB of memory, "), "{error}");
}

/// Returns a PNG whose header promises `side` x `side` pixels.
fn header(folder: &Folder, side: u32) -> Vec<u8> {
    let mut png = std::fs::read(folder.path("test/dog/1.png")).unwrap();
    // Width and height in the IHDR chunk, and its checksum.
    png[16..20].copy_from_slice(&side.to_be_bytes());
    png[20..24].copy_from_slice(&side.to_be_bytes());
    let crc = crc32(&png[12..29]);
    png[29..33].copy_from_slice(&crc.to_be_bytes());
    png
}

fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    crc.sum()
}
