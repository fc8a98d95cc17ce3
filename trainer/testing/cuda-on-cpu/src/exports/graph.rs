//! Graphs, made by stream capture only.

use std::ffi::{c_int, c_ulonglong};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{exports, write_out};
use crate::branches::Branches;
use crate::capture::{self, Recording};
use crate::context::current;
use crate::cu_result::{INVALID_HANDLE, INVALID_VALUE};
use crate::handles::{self, Table};
use crate::op::Op;
use crate::stream::StreamRef;

/// The nodes of a capture.
#[derive(Debug)]
struct Graph {
    recording: Arc<Recording>,
    /// Handle of the first node; the others follow.
    first: usize,
}

/// An instantiated graph.
#[derive(Debug)]
struct Executable {
    recording: Arc<Recording>,
    branches: Branches,
    /// Whether the graph allocates memory that it does not free. Such a graph can be launched only once.
    allocates: bool,
    launched: AtomicBool,
}

/// Distance between the handles of consecutive nodes.
const NODE_STRIDE: usize = 16;

static GRAPHS: Table<Graph> = Table::new();
static EXECUTABLES: Table<Executable> = Table::new();

exports! {
    fn cuStreamEndCapture(stream: usize, graph: Option<&mut usize>) {
        let target = StreamRef::of(stream)?;
        let to = graph.ok_or(INVALID_VALUE)?;
        *to = 0;
        let recording = Arc::new(capture::end(&target)?);
        let first = handles::reserve(recording.nodes.len());
        write_out(Some(to), GRAPHS.add(Arc::new(Graph { recording, first })))
    }

    /// Returns only the count if `nodes` is null.
    unsafe fn cuGraphGetNodes(graph: usize, nodes: *mut usize, count: Option<&mut usize>) {
        let graph = GRAPHS.get(graph)?;
        let count = count.ok_or(INVALID_VALUE)?;
        if nodes.is_null() {
            return write_out(Some(count), graph.recording.nodes.len());
        }
        for index in 0..*count {
            let handle = if index < graph.recording.nodes.len() { graph.first + NODE_STRIDE * index } else { 0 };
            // SAFETY: the caller has room for `count`.
            unsafe { nodes.add(index).write(handle) };
        }
        *count = graph.recording.nodes.len().min(*count);
        Ok(())
    }

    fn cuGraphNodeGetType(node: usize, kind: Option<&mut c_int>) {
        let is = GRAPHS.find(|graph| {
            let index = node.checked_sub(graph.first)? / NODE_STRIDE;
            graph.recording.nodes.get(index).map(|node| node.op.node_type())
        });
        write_out(kind, is.map_err(|_| INVALID_VALUE)?)
    }

    fn cuGraphInstantiateWithFlags(executable: Option<&mut usize>, graph: usize, flags: c_ulonglong) {
        /// `CUDA_GRAPH_INSTANTIATE_FLAG_*`.
        const FLAGS: c_ulonglong = 15;
        let graph = GRAPHS.get(graph)?;
        let to = executable.filter(|_| flags & !FLAGS == 0).ok_or(INVALID_VALUE)?;
        let count = |is: fn(&Op) -> bool| graph.recording.nodes.iter().filter(|node| is(&node.op)).count();
        let allocates = count(|op| matches!(op, Op::Allocated)) > count(|op| matches!(op, Op::Freed));
        let (recording, branches) = (graph.recording.clone(), Branches::new(&graph.recording, current()?)?);
        let launched = AtomicBool::new(false);
        write_out(Some(to), EXECUTABLES.add(Arc::new(Executable { recording, branches, allocates, launched })))
    }

    fn cuGraphDestroy(graph: usize) {
        GRAPHS.remove(graph)?;
        Ok(())
    }

    fn cuGraphExecDestroy(executable: usize) {
        EXECUTABLES.remove(executable)?;
        Ok(())
    }

    fn cuGraphUpload(executable: usize, stream: usize) {
        StreamRef::of(stream)?;
        EXECUTABLES.get(executable)?;
        Ok(())
    }

    fn cuGraphLaunch(executable: usize, stream: usize) {
        let target = StreamRef::of(stream)?;
        let executable = EXECUTABLES.get(executable)?;
        if executable.allocates && executable.launched.swap(true, Ordering::AcqRel) {
            return Err(INVALID_VALUE);
        }
        let device = target.device().index;
        let elsewhere = |op: &Op| matches!(op, Op::Kernel(launch) if launch.device() != device);
        if executable.recording.nodes.iter().any(|node| elsewhere(&node.op)) {
            // The real driver runs each node on the node's GPU; here a stream has one GPU.
            return Err(INVALID_HANDLE);
        }
        executable.branches.launch(&executable.recording, &target)
    }
}
