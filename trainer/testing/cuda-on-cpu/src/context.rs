//! The stack of current contexts of each thread.

use std::cell::RefCell;
use std::sync::atomic::Ordering;

use crate::cu_result::{DriverResult, INVALID_CONTEXT, INVALID_VALUE};
use crate::machine::{Device, machine};

/// Maximum depth of the stack.
const MAX_DEPTH: usize = 64;

#[derive(Clone, Copy)]
struct Stack {
    contexts: [Option<&'static Device>; MAX_DEPTH],
    len: usize,
}

thread_local! {
    // No type with a destructor: destructors of other thread-local values make driver calls too.
    static STACK: RefCell<Stack> = const { RefCell::new(Stack { contexts: [None; MAX_DEPTH], len: 0 }) };
}

fn top() -> Option<&'static Device> {
    STACK.with_borrow(|stack| stack.len.checked_sub(1).and_then(|at| stack.contexts[at]))
}

/// Returns the GPU whose context is current, if the context is usable.
pub(crate) fn current() -> DriverResult<&'static Device> {
    machine()?;
    let device = top().ok_or(INVALID_CONTEXT)?;
    device.usable()?;
    Ok(device)
}

/// Returns the current context; 0 if there is none.
pub(crate) fn handle() -> DriverResult<usize> {
    machine()?;
    Ok(top().map_or(0, Device::context))
}

/// Replaces the current context; 0 removes it.
pub(crate) fn set(context: usize) -> DriverResult {
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

fn retained(context: usize) -> DriverResult<Option<&'static Device>> {
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

/// Pushes a context.
pub(crate) fn push(context: usize) -> DriverResult {
    let device = retained(context)?.ok_or(INVALID_CONTEXT)?;
    STACK.with_borrow_mut(|stack| {
        *stack.contexts.get_mut(stack.len).ok_or(INVALID_VALUE)? = Some(device);
        stack.len += 1;
        Ok(())
    })
}

/// Pops the current context and returns it.
pub(crate) fn pop() -> DriverResult<usize> {
    machine()?;
    let device = top().ok_or(INVALID_CONTEXT)?;
    STACK.with_borrow_mut(|stack| stack.len -= 1);
    Ok(device.context())
}
