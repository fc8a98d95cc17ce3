//! The context that is current to a thread.

use std::cell::RefCell;
use std::sync::atomic::Ordering;

use crate::code::{Answer, INVALID_CONTEXT, INVALID_VALUE};
use crate::machine::{Device, machine};

/// More contexts than anybody stacks.
const MOST: usize = 64;

#[derive(Clone, Copy)]
struct Stack {
    contexts: [Option<&'static Device>; MOST],
    len: usize,
}

thread_local! {
    // of no type that has to be dropped: destructors of other thread-local values make calls too
    static STACK: RefCell<Stack> = const { RefCell::new(Stack { contexts: [None; MOST], len: 0 }) };
}

fn top() -> Option<&'static Device> {
    STACK.with_borrow(|stack| stack.len.checked_sub(1).and_then(|at| stack.contexts[at]))
}

/// The GPU whose context is current, if it may be used.
pub(crate) fn current() -> Answer<&'static Device> {
    machine()?;
    let device = top().ok_or(INVALID_CONTEXT)?;
    device.usable()?;
    Ok(device)
}

/// The current context, 0 for none.
pub(crate) fn handle() -> Answer<usize> {
    machine()?;
    Ok(top().map_or(0, Device::context))
}

/// Puts another context in the place of the current one; 0 only takes that away.
pub(crate) fn set(context: usize) -> Answer {
    let device = retained(context)?;
    STACK.with_borrow_mut(|stack| {
        stack.len = stack.len.saturating_sub(1);
        if let Some(device) = device {
            stack.contexts[stack.len] = Some(device);
            stack.len += 1;
        }
    });
    Ok(())
}

fn retained(context: usize) -> Answer<Option<&'static Device>> {
    let machine = machine()?;
    if context == 0 {
        return Ok(None);
    }
    let device = machine.of_context(context)?;
    match device.retained.load(Ordering::Acquire) {
        0 => Err(INVALID_CONTEXT),
        _ => Ok(Some(device)),
    }
}

/// Puts a context on top.
pub(crate) fn push(context: usize) -> Answer {
    let device = retained(context)?.ok_or(INVALID_CONTEXT)?;
    STACK.with_borrow_mut(|stack| {
        *stack.contexts.get_mut(stack.len).ok_or(INVALID_VALUE)? = Some(device);
        stack.len += 1;
        Ok(())
    })
}

/// Takes the current context away, and gives it.
pub(crate) fn pop() -> Answer<usize> {
    machine()?;
    let device = top().ok_or(INVALID_CONTEXT)?;
    STACK.with_borrow_mut(|stack| stack.len -= 1);
    Ok(device.context())
}
