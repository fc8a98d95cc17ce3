//! The hash FNV-1a with 64 bits: short and the same in every process and version, unlike the standard library's hashes.
//! Source: <http://www.isthe.com/chongo/tech/comp/fnv/>.

/// Returns the FNV-1a hash of `bytes`.
pub fn hash(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    #[test]
    fn hashes_equal_the_published_test_vectors() {
        assert_eq!(super::hash([]), 0xcbf2_9ce4_8422_2325);
        assert_eq!(super::hash(*b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(super::hash(*b"foobar"), 0x8594_4171_f739_67e8);
    }
}
