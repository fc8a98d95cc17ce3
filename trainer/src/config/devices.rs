//! The value of `parallel.devices`.

use std::fmt;

use super::key::{KeyValue, Range};
use super::value::{RawValue, ValueError};

/// The devices of a run on one machine, written `cpus:4` or `gpus:4`: `--cpus 4` and `--gpus 4`. Processes in mode `ddp`, devices
/// of one process in mode `dp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Devices {
    /// Parts of the CPU.
    Cpus(usize),
    /// GPUs.
    Gpus(usize),
}

impl Devices {
    /// Largest number of devices on one machine. A larger value is a typing mistake.
    pub const MOST: usize = 1024;

    /// Returns the number of devices.
    pub fn count(self) -> usize {
        match self {
            Self::Cpus(count) | Self::Gpus(count) => count,
        }
    }

    /// Returns another number of devices of the same kind.
    pub fn with_count(self, count: usize) -> Self {
        match self {
            Self::Cpus(_) => Self::Cpus(count),
            Self::Gpus(_) => Self::Gpus(count),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let (kind, count) = text.split_once(':')?;
        let count = count.parse().ok().filter(|count| (1..=Self::MOST).contains(count))?;
        match kind {
            "cpus" => Some(Self::Cpus(count)),
            "gpus" => Some(Self::Gpus(count)),
            _ => None,
        }
    }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpus(count) => write!(f, "cpus:{count}"),
            Self::Gpus(count) => write!(f, "gpus:{count}"),
        }
    }
}

impl KeyValue for Devices {
    const TYPE: &'static str = "`\"cpus:N\"`, `\"gpus:N\"`";

    fn read(raw: &RawValue, _: &Range) -> Result<Self, ValueError> {
        let text = raw.string()?;
        Self::parse(&text).ok_or_else(|| {
            ValueError::new(format!(
                "expected \"cpus:N\" or \"gpus:N\" with N from 1 to {}, found {text:?}",
                Self::MOST
            ))
            .hint("say how many: --cpus 4 or --gpus 4; in a file devices = \"cpus:4\" or \"gpus:4\"")
        })
    }

    fn write(&self) -> Option<toml::Value> {
        Some(self.to_string().into())
    }
}
