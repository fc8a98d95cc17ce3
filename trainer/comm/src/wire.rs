//! Little-endian encoding of control messages. Every read is checked, since the bytes come from the network.

/// Appends fields.
#[derive(Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn u8(&mut self, v: u8) {
        self.0.push(v);
    }
    pub(crate) fn u32(&mut self, v: u32) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }
    pub(crate) fn u64(&mut self, v: u64) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }
    pub(crate) fn bytes(&mut self, v: &[u8]) {
        self.u32(v.len() as u32);
        self.0.extend_from_slice(v);
    }
    pub(crate) fn text(&mut self, v: &str) {
        self.bytes(v.as_bytes());
    }
    #[cfg(test)]
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
    /// Returns the bytes behind their length, as [`split_frame`] expects them.
    pub(crate) fn into_frame(self) -> Vec<u8> {
        let mut frame = (self.0.len() as u32).to_le_bytes().to_vec();
        frame.extend_from_slice(&self.0);
        frame
    }
}

/// Reads fields from the front. Each method returns `None` if bytes are missing or invalid.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }
    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|b| b[0])
    }
    pub(crate) fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }
    pub(crate) fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }
    pub(crate) fn bytes(&mut self) -> Option<Vec<u8>> {
        let len = self.u32()? as usize;
        self.take(len).map(<[u8]>::to_vec)
    }
    pub(crate) fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?).ok()
    }
}

/// Largest control message, in bytes. Keys and values are short (addresses, file-descriptor numbers). The limit prevents a
/// damaged length from allocating gigabytes.
pub(crate) const MAX_FRAME: usize = 16 << 20;

/// Removes the first whole frame from `buffer` and returns it. `Err` with the length if it is out of bounds.
pub(crate) fn split_frame(buffer: &mut Vec<u8>) -> Result<Option<Vec<u8>>, usize> {
    let Some(head) = buffer.first_chunk::<4>() else { return Ok(None) };
    let len = u32::from_le_bytes(*head) as usize;
    if len > MAX_FRAME {
        return Err(len);
    }
    if buffer.len() < 4 + len {
        return Ok(None);
    }
    let frame = buffer[4..4 + len].to_vec();
    buffer.drain(..4 + len);
    Ok(Some(frame))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_out_whole_or_not_at_all() {
        let mut w = Writer::default();
        w.text("key");
        w.u64(7);
        let frame = w.into_frame();
        let mut buffer = Vec::new();
        for byte in &frame[..frame.len() - 1] {
            buffer.push(*byte);
            assert_eq!(split_frame(&mut buffer), Ok(None));
        }
        buffer.push(frame[frame.len() - 1]);
        buffer.push(99);
        let body = split_frame(&mut buffer).unwrap().unwrap();
        let mut r = Reader::new(&body);
        assert_eq!((r.text(), r.u64(), r.u8()), (Some("key".into()), Some(7), None));
        assert_eq!(buffer, [99]);
        assert_eq!(split_frame(&mut vec![255; 8]), Err(u32::MAX as usize));
    }
}
