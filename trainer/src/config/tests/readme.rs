//! The tables of keys in `configs/README.md`, which come from the declarations.

use std::path::Path;

use crate::config::key_tables;

const START: &str = "<!-- From trainer/src/config/sections.rs; update with \
                     `UPDATE_README=1 cargo test --release -p trainer tables_in_the_readme` -->\n";
const END: &str = "\n<!-- The end of the tables of keys. -->";

#[test]
fn tables_in_the_readme_are_up_to_date() {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/README.md"));
    let readme = std::fs::read_to_string(path).unwrap();
    let (before, rest) = readme.split_once(START).expect("the line that opens the tables of keys");
    let (tables, after) = rest.split_once(END).expect("the line that closes the tables of keys");
    let declared = key_tables();
    if std::env::var_os("UPDATE_README").is_some() {
        return std::fs::write(path, [before, START, &declared, END, after].concat()).unwrap();
    }
    let stale = tables.lines().zip(declared.lines()).find(|(old, new)| old != new);
    assert!(tables == declared, "configs/README.md is not what sections.rs declares: {stale:#?}\n{START}");
}
