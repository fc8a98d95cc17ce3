//! Runs a graph. Each captured stream is a branch, which runs on its own stream. So only the dependencies of the capture order the
//! branches, as with the real driver: a missing dependency leads to wrong results here too.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use crate::capture::Recording;
use crate::cu_result::DriverResult;
use crate::event::{DISABLE_TIMING, Event};
use crate::machine::Device;
use crate::op::Op;
use crate::stream::{NON_BLOCKING, Stream, StreamRef};

/// A graph's branches except the one that runs on the stream of the launch.
#[derive(Debug)]
pub(crate) struct Branches(BTreeMap<usize, Arc<Stream>>);

impl Branches {
    /// Makes a stream on `device` for each forked stream of the recording.
    pub(crate) fn new(recording: &Recording, device: &'static Device) -> DriverResult<Self> {
        let forked: HashSet<_> = recording.nodes.iter().map(|node| node.stream).collect();
        let forked = forked.into_iter().filter(|stream| *stream != recording.origin);
        forked
            .map(|stream| Ok((stream, Stream::start(device, NON_BLOCKING, 0)?)))
            .collect::<DriverResult<_>>()
            .map(Self)
    }

    /// Submits the nodes, behind all work of `target`. Work that is submitted to `target` later runs after all of them.
    pub(crate) fn launch(&self, recording: &Recording, target: &StreamRef) -> DriverResult {
        // A graph that is launched in a capture becomes part of the other graph, in the order of the calls.
        if self.0.is_empty() || target.is_capturing() {
            return target.submit_all(recording.nodes.iter().map(|node| node.op.clone()));
        }
        let event = || {
            let event = Arc::new(Event::new(target.device().index, DISABLE_TIMING));
            let ticket = event.record();
            (event, ticket)
        };
        let awaited: HashMap<_, _> =
            recording.nodes.iter().flat_map(|node| &node.after).map(|at| (*at, event())).collect();
        let start = event();
        let mut ops: HashMap<usize, Vec<Op>> =
            HashMap::from([(recording.origin, vec![Op::Record(start.0.clone(), start.1)])]);
        for stream in self.0.keys() {
            ops.insert(*stream, vec![Op::Wait(start.0.clone(), start.1)]);
        }
        for node in &recording.nodes {
            let branch = ops.entry(node.stream).or_default();
            branch.extend(node.after.iter().map(|at| Op::Wait(awaited[at].0.clone(), awaited[at].1)));
            branch.push(node.op.clone());
            let done = awaited.get(&(node.stream, node.number));
            branch.extend(done.map(|(event, ticket)| Op::Record(event.clone(), *ticket)));
        }
        let mut last = ops.remove(&recording.origin).unwrap_or_default();
        for (stream, branch) in &self.0 {
            let (end, ticket) = event();
            let ends = Op::Record(end.clone(), ticket);
            branch.submit(ops.remove(stream).unwrap_or_default().into_iter().chain([ends]))?;
            last.push(Op::Wait(end, ticket));
        }
        target.submit_all(last)
    }
}

impl Drop for Branches {
    fn drop(&mut self) {
        self.0.values().for_each(|stream| stream.destroy());
    }
}
