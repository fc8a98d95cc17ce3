//! Single images outside a data set, for prediction.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::file::read_error;
use super::padding::ImagePadding;
use super::{dataset_info, image_folder};
use crate::encoded::{ImageFile, Resize, ten_crop_side};
use crate::{DataError, ImageShape, TEN_CROP};

/// Returns the images that `paths` name: files as they are, and folders with all images in them and below, sorted by path.
/// An image that is named twice is returned once. Returns the errors too: a path that does not exist, a folder without an image, a
/// folder with an image of a format that cannot be read.
pub fn list(paths: &[PathBuf]) -> (Vec<PathBuf>, Vec<DataError>) {
    let (mut files, mut errors, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
    for path in paths {
        let (found, refused) = match std::fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => image_folder::images_below(path),
            Ok(_) => (vec![path.clone()], Vec::new()),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let hint = "name images (.png, .jpg, .jpeg) or folders that contain images";
                (Vec::new(), vec![DataError::new(path, "there is no such file or folder", hint)])
            }
            Err(error) => (Vec::new(), vec![read_error(path, &error)]),
        };
        files.extend(found.into_iter().filter(|file| seen.insert(file.clone())));
        errors.extend(refused);
    }
    (files, errors)
}

/// Decodes one image for a network that was trained on data set `name` with images of `shape`. Returns `[C, H, W]`.
///
/// The image is resized to the data set's own size (bilinear with antialiasing, as torchvision's `Resize`), made grey where the
/// data set is grey (PIL's `convert("L")`), and padded to `shape` as the data set is ([`super::LoadRequest::image_size`]).
/// `resize` is that of the data set ([`super::LoadRequest::resize`]).
///
/// # Errors
/// A file that cannot be read, or that is not a PNG or JPEG.
pub fn decode(path: &Path, name: &str, shape: ImageShape, resize: Option<usize>) -> Result<Vec<u8>, DataError> {
    let info = dataset_info(name);
    let side = |own: Option<usize>, side: usize| own.unwrap_or(side).min(side);
    let height = side(info.and_then(|info| info.height), shape.height);
    let width = side(info.and_then(|info| info.width), shape.width);
    let colour = ImageShape { channels: 3, height, width };
    let mut pixels = vec![0; colour.len()];
    let resize = resize_to(path, (height, width), resize)?;
    ImageFile::Path(path.to_owned()).decode(colour, resize, |_, _| None, &mut pixels)?;
    if shape.channels == 1 {
        pixels = grey(&pixels);
    }
    let mut out = Vec::with_capacity(shape.len());
    ImagePadding::between(ImageShape { channels: shape.channels, ..colour }, shape).append(&pixels, &mut out);
    Ok(out)
}

/// Decodes ten views of one image, `[10, C, H, W]` ([`crate::TEN_CROP`]), for a network of colour images as in [`decode`].
///
/// # Errors
/// A file that cannot be read, or that is not a PNG or JPEG. Or `resize` and `shape` do not determine the side to which the
/// shorter side of the image is resized.
pub fn decode_ten_crops(path: &Path, shape: ImageShape, resize: Option<usize>) -> Result<Vec<u8>, DataError> {
    let side = ten_crop_side(resize_to(path, (shape.height, shape.width), resize)?)?;
    let mut pixels = vec![0; TEN_CROP * shape.len()];
    ImageFile::Path(path.to_owned()).decode_ten_crops(shape, side, &mut pixels)?;
    Ok(pixels)
}

/// Returns how an image becomes one of `height` x `width` pixels. `resize` is that of the data set.
fn resize_to(path: &Path, (height, width): (usize, usize), resize: Option<usize>) -> Result<Resize, DataError> {
    Ok(match resize {
        None => Resize::Whole,
        Some(side) if side >= height.max(width) => Resize::ShorterSide(side),
        Some(side) => {
            let cause = format!("no centre of {width}x{height} pixels can be cut out of an image resized to {side}");
            return Err(DataError::new(path, cause, "data.resize must be at least the side of the network's images"));
        }
    })
}

/// Returns the luminance of RGB planes in PIL's fixed-point arithmetic.
fn grey(planes: &[u8]) -> Vec<u8> {
    let plane = planes.len() / 3;
    let value = |at: usize| u32::from(planes[at]);
    (0..plane)
        .map(|at| {
            ((value(at) * 19_595 + value(plane + at) * 38_470 + value(2 * plane + at) * 7_471 + 0x8000) >> 16) as u8
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pictures::{rgb, save_grey_png, save_png};

    #[test]
    fn images_are_made_grey_and_padded_as_their_data_set_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.png");
        let pixels: Vec<u8> = rgb(28, 28, |x, y| [(x * 7 + y) as u8; 3]).into_iter().step_by(3).collect();
        save_grey_png(&path, 28, 28, &pixels);
        let pixels = decode(&path, "mnist", ImageShape { channels: 1, height: 32, width: 32 }, None).unwrap();
        // Two black rows and columns on each side.
        assert!(pixels[..2 * 32 + 2].iter().all(|&x| x == 0));
        assert_eq!(pixels[5 * 32 + 4], 2 * 7 + 3);
        // PIL: Image.new("RGB", (1, 1), (10, 200, 60)).convert("L").getpixel((0, 0)) is 127.
        save_png(&path, 28, 28, |_, _| [10, 200, 60]);
        let pixels = decode(&path, "mnist", ImageShape { channels: 1, height: 28, width: 28 }, None).unwrap();
        assert_eq!(pixels, [127; 28 * 28]);
    }

    #[test]
    fn images_of_another_size_are_resized() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.png");
        save_png(&path, 64, 48, |x, _| [if x < 32 { 0 } else { 200 }, 7, 9]);
        let shape = ImageShape { channels: 3, height: 32, width: 32 };
        let pixels = decode(&path, "cifar10", shape, None).unwrap();
        assert_eq!((pixels[3], pixels[28], pixels[32 * 32], pixels[2 * 32 * 32]), (0, 200, 7, 9));
        let shape = ImageShape { channels: 3, height: 10, width: 20 };
        assert_eq!(decode(&path, "image-folder", shape, None).unwrap().len(), shape.len());
    }

    #[test]
    fn folders_are_listed_in_order_and_files_once() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b/2.png", "b/1.PNG", "a.jpg", ".hidden.png", "notes.txt"] {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        let first = folder.path().join("b/2.png");
        let names: Vec<String> = list(&[first, folder.path().to_owned()])
            .0
            .iter()
            .map(|path| path.strip_prefix(folder.path()).unwrap().display().to_string())
            .collect();
        assert_eq!(names, ["b/2.png", "a.jpg", "b/1.PNG"]);
        let (found, errors) = list(&[folder.path().join("c.png"), folder.path().join("a.jpg")]);
        assert_eq!(found, [folder.path().join("a.jpg")]);
        let error = &errors[0];
        assert_eq!(error.cause, "there is no such file or folder");
        // A link to itself exists and cannot be read.
        let link = folder.path().join("link.png");
        std::os::unix::fs::symlink("link.png", &link).unwrap();
        let (found, errors) = list(&[link]);
        assert!(found.is_empty() && errors[0].cause.starts_with("cannot be read: "), "{}", errors[0]);
        let empty = tempfile::tempdir().unwrap();
        let error = &list(&[empty.path().to_owned()]).1[0];
        assert_eq!((error.cause.as_str(), error.hint.is_empty()), ("the folder holds no image", false));
    }
}
