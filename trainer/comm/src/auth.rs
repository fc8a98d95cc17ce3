//! Authentication of connections: both ends prove that they know the run's secret, without sending it.
//!
//! ```text
//! dialer   → listener   hello:  magic, purpose, rank, world, nonce          (HELLO_BYTES)
//! listener → dialer     magic, nonce, HMAC(secret, "listener" hello nonce)  (REPLY_BYTES)
//! dialer   → listener   HMAC(secret, "dialer" hello nonce)                  (PROOF_BYTES)
//!                       or zeros, if the listener's HMAC is wrong
//! listener → dialer     0, or a length and the reason why the rank cannot join
//! ```
//!
//! All parts of the dialer have fixed sizes and must arrive before a deadline. So an unauthenticated peer costs the listener at
//! most a few hundred bytes and one handshake slot for a few seconds. Both sides choose new nonces, so a recorded handshake
//! cannot be replayed. Data after the handshake is neither encrypted nor signed, so anyone who can read the network can read
//! the data.

use std::fmt;
use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::error::{CommError, Result};
use super::hex;
use super::system;

const MAGIC: &[u8; 8] = b"trncomm2";
const NONCE: usize = 16;
pub(crate) const HELLO_BYTES: usize = 8 + 1 + 4 + 4 + NONCE;
pub(crate) const PROOF_BYTES: usize = 32;
pub(crate) const REPLY_BYTES: usize = MAGIC.len() + NONCE + PROOF_BYTES;
/// Time limit of the whole handshake, on either side.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of the reason for a refusal, in bytes.
const MAX_REFUSAL: usize = 4096;
/// The reasons for refusing a peer: it speaks another protocol, or does not know the secret.
const OTHER_PROTOCOL: &str = "it does not speak this protocol: another program, or another version of this one";
const OTHER_SECRET: &str = "it does not know this run's secret";

/// The secret of a run: 32 bytes; 64 hexadecimal digits in an environment variable.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Makes a new secret from the kernel's random generator.
    ///
    /// # Errors
    /// [`Setup`](super::ErrorKind::Setup) if the kernel provides no random bytes.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 32];
        random(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// Reads the text of [`Secret::to_hex`]; `None` for any other text. Spaces around it are ignored.
    pub fn from_hex(text: &str) -> Option<Self> {
        hex::decode(text.trim()).map(Self)
    }

    /// Derives a secret from the user's words, or from another secret and a purpose. The secret is only as hard to guess as the
    /// words.
    pub fn from_words(words: &[&str]) -> Self {
        let mut mac = Self([0; 32]).mac();
        for word in words {
            mac.update(&(word.len() as u64).to_le_bytes());
            mac.update(word.as_bytes());
        }
        Self(mac.finalize().into_bytes().into())
    }

    /// Returns 64 hexadecimal digits.
    pub fn to_hex(&self) -> String {
        hex::encode(&self.0)
    }

    fn mac(&self) -> Hmac<Sha256> {
        Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length")
    }

    fn proof(&self, side: &[u8], hello: &[u8], nonce: &[u8]) -> [u8; PROOF_BYTES] {
        let mut mac = self.mac();
        mac.update(side);
        mac.update(hello);
        mac.update(nonce);
        mac.finalize().into_bytes().into()
    }

    /// Checks a proof, in constant time.
    fn verify(&self, side: &[u8], hello: &[u8], nonce: &[u8], proof: &[u8]) -> bool {
        let mut mac = self.mac();
        mac.update(side);
        mac.update(hello);
        mac.update(nonce);
        mac.verify_slice(proof).is_ok()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

fn random(bytes: &mut [u8]) -> Result<()> {
    system::random(bytes).map_err(|error| CommError::setup(format!("the kernel provides no random bytes: {error}")))
}

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Purpose {
    /// Control connection of a rank to the store.
    Store = 1,
    /// Data connection between two ranks.
    Mesh = 2,
}

/// The dialer's first message. The listener does not trust its content before it has checked the proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub purpose: Purpose,
    pub rank: u32,
    pub world_size: u32,
    pub nonce: [u8; NONCE],
}

impl Hello {
    pub(crate) fn new(purpose: Purpose, rank: usize, world_size: usize) -> Result<Self> {
        let mut nonce = [0; NONCE];
        random(&mut nonce)?;
        Ok(Self { purpose, rank: rank as u32, world_size: world_size as u32, nonce })
    }

    pub(crate) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut out = [0; HELLO_BYTES];
        out[..8].copy_from_slice(MAGIC);
        out[8] = self.purpose as u8;
        out[9..13].copy_from_slice(&self.rank.to_le_bytes());
        out[13..17].copy_from_slice(&self.world_size.to_le_bytes());
        out[17..].copy_from_slice(&self.nonce);
        out
    }

    pub(crate) fn decode(bytes: &[u8; HELLO_BYTES]) -> std::result::Result<Self, &'static str> {
        if &bytes[..8] != MAGIC {
            return Err(OTHER_PROTOCOL);
        }
        let purpose = match bytes[8] {
            1 => Purpose::Store,
            2 => Purpose::Mesh,
            _ => return Err("it has an unknown purpose"),
        };
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut nonce = [0; NONCE];
        nonce.copy_from_slice(&bytes[17..]);
        Ok(Self { purpose, rank: word(9), world_size: word(13), nonce })
    }
}

/// The listener's half: answers a hello and checks the proof.
pub(crate) struct Challenge {
    hello: Hello,
    nonce: [u8; NONCE],
}

impl Challenge {
    pub(crate) fn new(hello: Hello) -> Result<Self> {
        let mut nonce = [0; NONCE];
        random(&mut nonce)?;
        Ok(Self { hello, nonce })
    }
    pub(crate) fn hello(&self) -> Hello {
        self.hello
    }
    pub(crate) fn reply(&self, secret: &Secret) -> [u8; REPLY_BYTES] {
        let mut out = [0; REPLY_BYTES];
        let (magic, rest) = out.split_at_mut(MAGIC.len());
        magic.copy_from_slice(MAGIC);
        rest[..NONCE].copy_from_slice(&self.nonce);
        rest[NONCE..].copy_from_slice(&secret.proof(b"listener", &self.hello.encode(), &self.nonce));
        out
    }
    /// Checks the dialer's proof. The error is the reason for the refusal.
    pub(crate) fn check(&self, secret: &Secret, proof: &[u8]) -> std::result::Result<(), &'static str> {
        if secret.verify(b"dialer", &self.hello.encode(), &self.nonce, proof) { Ok(()) } else { Err(OTHER_SECRET) }
    }
}

/// Encodes the listener's last message: an empty text, or the reason for the refusal.
pub(crate) fn encode_refusal(refusal: Option<&str>) -> Vec<u8> {
    let text = refusal.unwrap_or_default().as_bytes();
    let text = &text[..text.len().min(MAX_REFUSAL)];
    let mut out = (text.len() as u32).to_le_bytes().to_vec();
    out.extend_from_slice(text);
    out
}

/// Why a handshake failed.
pub(crate) enum HandshakeError {
    /// The connection broke or was slow. Another attempt may succeed.
    Broken(String),
    /// The other side has not proved that it belongs to this job.
    Unauthenticated(&'static str),
    /// The other side belongs to this job, and one side refuses the other.
    Refused(String),
}

/// A stream with one deadline for the whole handshake, however slowly its bytes arrive.
struct HandshakeStream<'a> {
    stream: &'a TcpStream,
    until: Instant,
}

impl HandshakeStream<'_> {
    fn left(&self) -> std::result::Result<Duration, HandshakeError> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(HandshakeError::Broken("the handshake took too long".into())) } else { Ok(left) }
    }
    fn read(&mut self, buffer: &mut [u8]) -> std::result::Result<(), HandshakeError> {
        let mut filled = 0;
        while filled < buffer.len() {
            let broken = |e: std::io::Error| HandshakeError::Broken(e.to_string());
            self.stream.set_read_timeout(Some(self.left()?)).map_err(broken)?;
            match self.stream.read(&mut buffer[filled..]) {
                Ok(0) => return Err(HandshakeError::Broken("the connection was closed during the handshake".into())),
                Ok(n) => filled += n,
                Err(e) if matches!(e.kind(), IoKind::Interrupted | IoKind::WouldBlock | IoKind::TimedOut) => {}
                Err(e) => return Err(HandshakeError::Broken(e.to_string())),
            }
        }
        Ok(())
    }
    fn write(&mut self, bytes: &[u8]) -> std::result::Result<(), HandshakeError> {
        let broken = |e: std::io::Error| HandshakeError::Broken(e.to_string());
        self.stream.set_write_timeout(Some(self.left()?)).map_err(broken)?;
        self.stream.write_all(bytes).map_err(broken)
    }
    fn done(self) -> std::result::Result<(), HandshakeError> {
        let broken = |e: std::io::Error| HandshakeError::Broken(e.to_string());
        self.stream.set_read_timeout(None).map_err(broken)?;
        self.stream.set_write_timeout(None).map_err(broken)
    }
}

/// Runs the dialer's half of the handshake on a blocking stream.
pub(crate) fn dial(stream: &TcpStream, secret: &Secret, hello: &Hello) -> std::result::Result<(), HandshakeError> {
    let mut io = HandshakeStream { stream, until: Instant::now() + HANDSHAKE_TIMEOUT };
    let hello = hello.encode();
    io.write(&hello)?;
    let mut reply = [0; REPLY_BYTES];
    io.read(&mut reply)?;
    let (magic, reply) = reply.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(HandshakeError::Unauthenticated(OTHER_PROTOCOL));
    }
    let (nonce, proof) = reply.split_at(NONCE);
    if !secret.verify(b"listener", &hello, nonce, proof) {
        // The zeros tell an honest listener why the connection ends. A real proof would help a dishonest listener to join
        // elsewhere.
        let _ = io.write(&[0; PROOF_BYTES]);
        return Err(HandshakeError::Unauthenticated(OTHER_SECRET));
    }
    io.write(&secret.proof(b"dialer", &hello, nonce))?;
    let mut len = [0; 4];
    io.read(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_REFUSAL {
        return Err(HandshakeError::Unauthenticated(OTHER_PROTOCOL));
    }
    let mut text = vec![0; len];
    io.read(&mut text)?;
    io.done()?;
    if len > 0 { Err(HandshakeError::Refused(String::from_utf8_lossy(&text).into_owned())) } else { Ok(()) }
}

/// Runs the listener's half of the handshake on a blocking stream. `admit` may refuse a peer that has proved the secret.
pub(crate) fn accept(
    stream: &TcpStream,
    secret: &Secret,
    admit: impl FnOnce(&Hello) -> std::result::Result<(), String>,
) -> std::result::Result<Hello, HandshakeError> {
    let mut io = HandshakeStream { stream, until: Instant::now() + HANDSHAKE_TIMEOUT };
    let mut hello = [0; HELLO_BYTES];
    io.read(&mut hello)?;
    let hello = Hello::decode(&hello).map_err(HandshakeError::Unauthenticated)?;
    let challenge = Challenge::new(hello).map_err(|e| HandshakeError::Broken(e.message))?;
    io.write(&challenge.reply(secret))?;
    let mut proof = [0; PROOF_BYTES];
    io.read(&mut proof)?;
    challenge.check(secret, &proof).map_err(HandshakeError::Unauthenticated)?;
    let refusal = admit(&hello).err();
    io.write(&encode_refusal(refusal.as_deref()))?;
    io.done()?;
    refusal.map_or(Ok(hello), |cause| Err(HandshakeError::Refused(cause)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_survive_hex_and_hide_from_debug() {
        let secret = Secret::random().unwrap();
        assert_eq!(Secret::from_hex(&secret.to_hex()), Some(secret.clone()));
        assert_eq!(format!("{secret:?}"), "Secret(…)");
        assert_eq!(Secret::from_hex(&secret.to_hex()[1..]), None);
        assert_eq!(Secret::from_hex(&"zz".repeat(32)), None);
        assert_ne!(Secret::from_words(&["ab", "c"]), Secret::from_words(&["a", "bc"]));
    }

    #[test]
    fn a_proof_fits_its_own_challenge_only() {
        let (ours, theirs) = (Secret::random().unwrap(), Secret::random().unwrap());
        let hello = Hello::new(Purpose::Store, 1, 4).unwrap();
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        let challenge = Challenge::new(hello).unwrap();
        let proof = ours.proof(b"dialer", &hello.encode(), &challenge.nonce);
        assert_eq!(challenge.check(&ours, &proof), Ok(()));
        assert_eq!(challenge.check(&theirs, &proof), Err(OTHER_SECRET));
        assert!(Challenge::new(hello).unwrap().check(&ours, &proof).is_err(), "a recorded proof was accepted again");
        // The listener's own proof, sent back to the listener, must not pass for the dialer's proof.
        assert!(challenge.check(&ours, &challenge.reply(&ours)[MAGIC.len() + NONCE..]).is_err());
    }
}
