//! Passes the commit of the checkout to the program, which writes it to the `env.json` of each run (`report/environment.rs`).

#[path = "build/commit.rs"]
mod commit;

use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build");
    let folder = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it");
    // Outside a checkout, as in an archive of the sources, the program has no commit.
    let Some(commit) = Path::new(&folder).parent().and_then(commit::of_checkout) else { return };
    for path in commit.watched {
        println!("cargo:rerun-if-changed={}", path.display());
    }
    println!("cargo:rustc-env=TRAINER_COMMIT={}", commit.id);
}
