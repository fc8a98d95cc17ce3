//! Graphs, of captures only.

use std::ffi::{c_int, c_ulonglong};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{exports, put};
use crate::capture;
use crate::code::{INVALID_HANDLE, INVALID_VALUE};
use crate::handles::{self, Table};
use crate::op::Op;
use crate::stream::Target;

/// What a capture has seen.
#[derive(Debug)]
struct Graph {
    nodes: Arc<[Op]>,
    /// Handle of its first node; the others follow.
    first: usize,
}

/// A graph that can be launched.
#[derive(Debug)]
struct Executable {
    nodes: Arc<[Op]>,
    /// It allocates memory that it does not free: it can be launched once.
    allocates: bool,
    launched: AtomicBool,
}

/// From one node's handle to the next.
const STEP: usize = 16;

static GRAPHS: Table<Graph> = Table::new();
static EXECUTABLES: Table<Executable> = Table::new();

exports! {
    fn cuStreamEndCapture(stream: usize, graph: Option<&mut usize>) {
        let target = Target::of(stream)?;
        let to = graph.ok_or(INVALID_VALUE)?;
        *to = 0;
        let nodes: Arc<[Op]> = capture::end(&target)?.into();
        let first = handles::reserve(nodes.len());
        put(Some(to), GRAPHS.add(Arc::new(Graph { nodes, first })))
    }

    /// Without room for `nodes`, only counts them.
    unsafe fn cuGraphGetNodes(graph: usize, nodes: *mut usize, count: Option<&mut usize>) {
        let graph = GRAPHS.get(graph)?;
        let count = count.ok_or(INVALID_VALUE)?;
        if nodes.is_null() {
            return put(Some(count), graph.nodes.len());
        }
        for index in 0..*count {
            let handle = if index < graph.nodes.len() { graph.first + STEP * index } else { 0 };
            // SAFETY: the caller has room for `count`.
            unsafe { nodes.add(index).write(handle) };
        }
        *count = graph.nodes.len().min(*count);
        Ok(())
    }

    fn cuGraphNodeGetType(node: usize, kind: Option<&mut c_int>) {
        let is = GRAPHS.find(|graph| {
            let index = node.checked_sub(graph.first)? / STEP;
            graph.nodes.get(index).map(Op::node_type)
        });
        put(kind, is.map_err(|_| INVALID_VALUE)?)
    }

    fn cuGraphInstantiateWithFlags(executable: Option<&mut usize>, graph: usize, flags: c_ulonglong) {
        /// `CUDA_GRAPH_INSTANTIATE_FLAG_*`.
        const FLAGS: c_ulonglong = 15;
        let graph = GRAPHS.get(graph)?;
        let to = executable.filter(|_| flags & !FLAGS == 0).ok_or(INVALID_VALUE)?;
        let count = |is: fn(&Op) -> bool| graph.nodes.iter().filter(|op| is(op)).count();
        let allocates = count(|op| matches!(op, Op::Allocated)) > count(|op| matches!(op, Op::Freed));
        let nodes = graph.nodes.clone();
        put(Some(to), EXECUTABLES.add(Arc::new(Executable { nodes, allocates, launched: AtomicBool::new(false) })))
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
        Target::of(stream)?;
        EXECUTABLES.get(executable)?;
        Ok(())
    }

    fn cuGraphLaunch(executable: usize, stream: usize) {
        let target = Target::of(stream)?;
        let executable = EXECUTABLES.get(executable)?;
        if executable.allocates && executable.launched.swap(true, Ordering::AcqRel) {
            return Err(INVALID_VALUE);
        }
        let device = target.device().index;
        let elsewhere = |op: &Op| matches!(op, Op::Kernel(launch) if launch.device() != device);
        if executable.nodes.iter().any(elsewhere) {
            // the real one takes each node to its GPU; here a stream is of one
            return Err(INVALID_HANDLE);
        }
        target.submit_all(executable.nodes.iter().cloned())
    }
}
