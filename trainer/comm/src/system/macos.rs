//! The functions of this module for macOS.

/// Returns the id of this boot of the kernel. Empty if the kernel hides it.
#[allow(unsafe_code)]
pub(crate) fn boot_id() -> String {
    let mut text = [0_u8; 64];
    let mut len = text.len();
    // SAFETY: the name is a C string. The kernel writes at most `len` bytes to `text`, and their number to `len`.
    let result = unsafe {
        let (name, to) = (c"kern.bootsessionuuid".as_ptr(), text.as_mut_ptr().cast());
        libc::sysctlbyname(name, to, &mut len, std::ptr::null_mut(), 0)
    };
    let text = if result == 0 { &text[..len] } else { &[] };
    String::from_utf8_lossy(text).trim_end_matches('\0').to_owned()
}
