//! Agreement of all ranks on a step that may fail on some of them.

use super::communicator::Communicator;
use super::error::Result;

impl Communicator {
    /// Returns the first failure of a step that may fail on some ranks. `own` is this rank's reason, or empty if the step
    /// succeeded. Every rank gets the same result: the reason of the first of [`Self::ranks`] that failed, with its rank in the job;
    /// `None` if none did.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn first_failure(&self, own: &str) -> Result<Option<(usize, String)>> {
        let gathered = self.all_gather_v(own.as_bytes())?;
        let mut of_ranks = self.ranks().iter().zip(gathered.parts());
        let first = of_ranks.find(|(_, reason)| !reason.is_empty());
        Ok(first.map(|(rank, reason)| (*rank, String::from_utf8_lossy(reason).into_owned())))
    }
}
