//! The first line of a manifest: the names of its columns.

use std::path::Path;

use crate::DataError;
use crate::formats::image_folder::{READABLE_EXTENSIONS, UNREADABLE_EXTENSIONS};

pub(super) const HEADER: &str = "the first line names the columns: path,label or path,label,split";

/// Names of the columns in other programs' files.
const OTHERS: [(&str, &[&str]); 3] = [
    ("path", &["file", "filename", "filepath", "fname", "image", "imagepath", "imagename", "imageid", "img", "name"]),
    ("label", &["labels", "class", "classname", "category", "target", "tags", "y"]),
    ("split", &["set", "subset", "fold", "part", "partition"]),
];

/// Positions of the columns.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    pub(super) path: usize,
    pub(super) label: usize,
    pub(super) split: Option<usize>,
}

/// Reads the names of the columns.
pub(super) fn header(file: &Path, line: u64, fields: &[&str]) -> Result<Columns, DataError> {
    let mistake = |cause: String, hint: &str| Err(DataError::new(file, cause, hint).at(format!("line {line}")));
    let find = |name: &str| fields.iter().position(|field| *field == name);
    // A misspelt `split` must not make all images training images, so no other column is allowed.
    if let Some(unknown) = fields.iter().find(|field| !["path", "label", "split"].contains(*field)) {
        return mistake(format!("unknown column {unknown:?}"), &hint(unknown, fields));
    }
    let (Some(path), Some(label)) = (find("path"), find("label")) else {
        let name = if find("path").is_none() { "path" } else { "label" };
        return mistake(format!("there is no column {name:?}"), HEADER);
    };
    let columns = Columns { path, label, split: find("split") };
    match fields.len() == 2 + usize::from(columns.split.is_some()) {
        true => Ok(columns),
        false => mistake("a column is named twice".into(), HEADER),
    }
}

/// Returns the hint for a field of the first line that names no column.
fn hint(unknown: &str, fields: &[&str]) -> String {
    let separator =
        [(';', "semicolons"), ('\t', "tabs"), ('|', "bars")].into_iter().find(|(other, _)| unknown.contains(*other));
    if let (Some((_, name)), [_]) = (separator, fields) {
        return format!("the fields are separated by {name}: save the file with commas; {HEADER}");
    }
    let extension = |field: &&str| Path::new(field).extension().map(|end| end.to_string_lossy().to_ascii_lowercase());
    let is_image =
        |end: String| READABLE_EXTENSIONS.contains(&end.as_str()) || UNREADABLE_EXTENSIONS.contains(&end.as_str());
    if fields.iter().filter_map(extension).any(is_image) {
        return format!("the file begins with an image: insert a line before it; {HEADER}");
    }
    let folded: String =
        unknown.chars().filter(|letter| letter.is_alphanumeric()).flat_map(char::to_lowercase).collect();
    match OTHERS.iter().find(|(name, others)| *name == folded || others.contains(&folded.as_str())) {
        Some((name, _)) => format!("rename the column to {name}; {HEADER}"),
        None => format!("rename or remove the column; {HEADER}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_lines_of_other_programs_are_explained() {
        let hint = |line: &str| {
            let fields: Vec<&str> = line.split(',').collect();
            let error = header(Path::new("a.csv"), 1, &fields).err().expect("a mistake");
            error.hint.strip_suffix(&format!("; {HEADER}")).unwrap_or(&error.hint).to_owned()
        };
        assert_eq!(hint("file_name,label"), "rename the column to path");
        assert_eq!(hint("path,Class"), "rename the column to label");
        assert_eq!(hint("Path,label"), "rename the column to path");
        assert_eq!(hint("path,label,subset"), "rename the column to split");
        assert_eq!(hint("path,label,width"), "rename or remove the column");
        assert_eq!(hint("path;label"), "the fields are separated by semicolons: save the file with commas");
        assert_eq!(hint("path\tlabel"), "the fields are separated by tabs: save the file with commas");
        assert_eq!(hint("photos/1.jpg,cat"), "the file begins with an image: insert a line before it");
        assert_eq!(hint("path"), HEADER);
    }
}
