//! Translates one instruction to C: moves, memory, jumps. `arithmetic` and `cooperative` translate the rest.

use super::syntax::{Instruction, Operand, bytes_of};
use super::translate::{Writer, symbol};
use super::{arithmetic, cooperative};

pub(super) type TranslateResult<T> = Result<T, String>;

/// An instruction with accessors for the translation.
pub(super) struct Op<'a> {
    pub writer: &'a Writer<'a>,
    pub parts: &'a [String],
    pub operands: &'a [Operand],
}

impl Op<'_> {
    pub fn name(&self) -> &str {
        &self.parts[0]
    }

    pub fn has(&self, part: &str) -> bool {
        self.parts[1..].iter().any(|p| p == part)
    }

    /// Returns the last part that is a type.
    pub fn kind(&self) -> TranslateResult<&str> {
        self.parts.iter().rev().map(String::as_str).find(|p| bytes_of(p).is_some()).ok_or_else(|| "no type".to_owned())
    }

    /// Returns all parts that are types, in order.
    pub fn kinds(&self) -> Vec<&str> {
        self.parts[1..].iter().map(String::as_str).filter(|p| bytes_of(p).is_some()).collect()
    }

    pub fn operand(&self, index: usize) -> TranslateResult<&Operand> {
        self.operands.get(index).ok_or_else(|| format!("operand {index} is missing"))
    }

    /// Returns the C expression of an operand's bits.
    pub fn bits(&self, index: usize) -> TranslateResult<String> {
        self.writer.value(self.operand(index)?)
    }

    /// Returns an operand as a C value of type `kind`.
    pub fn read(&self, index: usize, kind: &str) -> TranslateResult<String> {
        self.read_operand(self.operand(index)?, kind)
    }

    pub fn read_operand(&self, operand: &Operand, kind: &str) -> TranslateResult<String> {
        let bits = self.writer.value(operand)?;
        // An f64 immediate may be used as an f32.
        Ok(match (kind, operand) {
            ("f32", Operand::F64(v)) => format!("((f32)as_f64({v}ull))"),
            _ => read_bits(&bits, kind),
        })
    }

    /// Assigns `value`, a C value of type `kind`, to the destination.
    pub fn write(&self, kind: &str, value: &str) -> TranslateResult<String> {
        self.write_operand(self.operand(0)?, kind, value)
    }

    pub fn write_operand(&self, operand: &Operand, kind: &str, value: &str) -> TranslateResult<String> {
        match operand {
            Operand::Name(name) if name == "_" => Ok(format!("(void)({value});")),
            Operand::Name(name) => {
                // Sign- or zero-extend a narrower value according to its type.
                let width = self.writer.width(name).ok_or_else(|| format!("`{name}` is not a register"))?;
                let bits = write_bits(value, kind);
                let wide = bytes_of(kind).is_some_and(|b| b < width) && kind.starts_with('s');
                let bits = if wide { format!("(u64)({kind})({bits})") } else { bits };
                Ok(format!("{} = {bits};", symbol(name)))
            }
            other => Err(format!("{other:?} is not a destination")),
        }
    }

    /// Returns the host address of a memory operand. With `shared` the operand is an offset into shared memory.
    pub fn address(&self, operand: &Operand, shared: bool) -> TranslateResult<String> {
        let Operand::Address(base, offset) = operand else { return Err(format!("{operand:?} is not an address")) };
        let base = match (base.is_empty(), self.writer.width(base)) {
            (true, _) => "0ull".to_owned(),
            (false, Some(_)) => symbol(base),
            (false, None) => self.writer.address_of(base).ok_or_else(|| format!("`{base}` is unknown"))?,
        };
        Ok(if shared {
            format!("(t->block->shared + (u32)({base} + {offset}ll))")
        } else {
            format!("(u8 *)({base} + {offset}ll)")
        })
    }

    pub fn in_shared(&self) -> bool {
        self.parts[1..].iter().any(|p| p == "shared" || p.starts_with("shared::"))
    }
}

/// Converts bits to a C value.
pub(super) fn read_bits(bits: &str, kind: &str) -> String {
    match kind {
        "f32" => format!("as_f32({bits})"),
        "f64" => format!("as_f64({bits})"),
        "f16" => format!("as_f16({bits})"),
        "bf16" => format!("as_bf16({bits})"),
        "pred" => format!("(u8)({bits} != 0)"),
        "b8" | "b16" | "b32" | "b64" | "b128" => format!("(u{})({bits})", &kind[1..]),
        "f16x2" | "bf16x2" | "tf32" => format!("(u32)({bits})"),
        _ => format!("({kind})({bits})"),
    }
}

/// Converts a C value to bits.
pub(super) fn write_bits(value: &str, kind: &str) -> String {
    match kind {
        "f32" => format!("of_f32({value})"),
        "f64" => format!("of_f64({value})"),
        "f16" => format!("of_f16({value})"),
        "bf16" => format!("of_bf16({value})"),
        "pred" => format!("(u8)(({value}) != 0)"),
        "b8" | "b16" | "b32" | "b64" | "b128" => format!("(u{})({value})", &kind[1..]),
        "f16x2" | "bf16x2" | "tf32" => format!("(u32)({value})"),
        _ => format!("(u{})({value})", &kind[1..]),
    }
}

pub(super) fn write(writer: &Writer<'_>, instruction: &Instruction) -> TranslateResult<String> {
    let op = Op { writer, parts: &instruction.op, operands: &instruction.operands };
    match op.name() {
        "mov" => mov(&op),
        "ld" | "ldu" => load(&op),
        "st" => store(&op),
        "cvta" => cvta(&op),
        "isspacep" => {
            let at = op.bits(1)?;
            let inside = format!(
                "(u8 *)({at}) >= t->block->shared && (u8 *)({at}) < t->block->shared + t->block->static_bytes + t->block->dynamic_bytes"
            );
            op.write("pred", &if op.in_shared() { format!("({inside})") } else { format!("!({inside})") })
        }
        "bra" => match op.operand(0)? {
            Operand::Name(label) => Ok(format!("goto {};", symbol(label))),
            _ => Err("no label".to_owned()),
        },
        "brx" => {
            let Operand::Name(table) = op.operand(1)? else { return Err("no table".to_owned()) };
            let labels = writer.targets(table).ok_or_else(|| format!("no table {table}"))?;
            let cases = labels.iter().enumerate().map(|(i, label)| format!("case {i}: goto {};", symbol(label)));
            Ok(format!("switch ({}) {{ {} default: abort(); }}", op.bits(0)?, cases.collect::<String>()))
        }
        "ret" | "exit" => Ok("return;".to_owned()),
        "trap" | "brkpt" => Ok("fprintf(stderr, \"cuda-on-cpu: a kernel trapped\\n\"); abort();".to_owned()),
        "call" => call(&op),
        "membar" | "fence" => Ok("__atomic_thread_fence(__ATOMIC_SEQ_CST);".to_owned()),
        "prefetch" | "prefetchu" | "discard" | "applypriority" | "griddepcontrol" | "setmaxnreg" => Ok(String::new()),
        "nanosleep" => Ok("t->polls |= 15; poll_memory(t);".to_owned()),
        "cp" => copy_async(&op),
        "atom" | "red" => cooperative::atomic(&op),
        _ => match cooperative::write(&op)? {
            Some(code) => Ok(code),
            None => arithmetic::write(&op),
        },
    }
}

fn mov(op: &Op<'_>) -> TranslateResult<String> {
    let kind = op.kind()?;
    let bytes = bytes_of(kind).unwrap_or(4);
    match (op.operand(0)?, op.operand(1)?) {
        (Operand::Vector(parts), _) => {
            let from = op.bits(1)?;
            let bits = 8 * bytes / parts.len();
            let mut code = format!("{{ u{} whole = {from}; ", 8 * bytes);
            for (i, part) in parts.iter().enumerate() {
                code += &op.write_operand(part, &format!("b{bits}"), &format!("whole >> {}", i * bits))?;
            }
            Ok(code + " }")
        }
        (_, Operand::Vector(parts)) => {
            let bits = 8 * bytes / parts.len();
            let mut joined = Vec::new();
            for (i, part) in parts.iter().enumerate() {
                joined.push(format!("(u{})(u{bits})({}) << {}", 8 * bytes, op.writer.value(part)?, i * bits));
            }
            op.write(&format!("b{}", 8 * bytes), &joined.join(" | "))
        }
        _ => {
            // The name of a kernel would be a function pointer, which is not supported.
            let bits = op.bits(1)?;
            op.write(&if kind == "pred" { "pred".to_owned() } else { format!("b{}", 8 * bytes) }, &bits)
        }
    }
}

/// Returns the C memory order of an ordered access. Ordered loads yield to other threads, because they may be polling.
fn ordered(op: &Op<'_>) -> Option<&'static str> {
    if op.has("acquire") {
        Some("__ATOMIC_ACQUIRE")
    } else if op.has("release") {
        Some("__ATOMIC_RELEASE")
    } else if op.has("relaxed") || op.has("volatile") || op.has("mmio") {
        Some("__ATOMIC_RELAXED")
    } else {
        None
    }
}

fn load(op: &Op<'_>) -> TranslateResult<String> {
    let kind = op.kind()?.to_owned();
    let bits = 8 * bytes_of(&kind).unwrap_or(4);
    let at = op.address(op.operand(1)?, op.in_shared())?;
    let parts = match op.operand(0)? {
        Operand::Vector(parts) => parts.clone(),
        one => vec![one.clone()],
    };
    let plain = match kind.as_bytes()[0] {
        b's' | b'u' => kind.clone(),
        _ => format!("b{bits}"),
    };
    let signed = if plain.starts_with('s') { format!("s{bits}") } else { format!("u{bits}") };
    if let Some(order) = ordered(op) {
        let mut code = format!("{{ poll_memory(t); {signed} *at = ({signed} *){at}; ");
        for (i, part) in parts.iter().enumerate() {
            code += &op.write_operand(part, &plain, &format!("__atomic_load_n(at + {i}, {order})"))?;
        }
        return Ok(code + " }");
    }
    let mut code = format!("{{ {signed} v[{}]; memcpy(v, {at}, sizeof v); ", parts.len());
    for (i, part) in parts.iter().enumerate() {
        code += &op.write_operand(part, &plain, &format!("v[{i}]"))?;
    }
    Ok(code + " }")
}

fn store(op: &Op<'_>) -> TranslateResult<String> {
    let bits = 8 * bytes_of(op.kind()?).unwrap_or(4);
    let at = op.address(op.operand(0)?, op.in_shared())?;
    let parts = match op.operand(1)? {
        Operand::Vector(parts) => parts.clone(),
        one => vec![one.clone()],
    };
    let values: TranslateResult<Vec<String>> =
        parts.iter().map(|p| Ok(format!("(u{bits})({})", op.writer.value(p)?))).collect();
    let values = values?;
    if let Some(order) = ordered(op) {
        let stores = values.iter().enumerate().map(|(i, v)| format!("__atomic_store_n(at + {i}, {v}, {order}); "));
        return Ok(format!("{{ u{bits} *at = (u{bits} *){at}; {} }}", stores.collect::<String>()));
    }
    Ok(format!("{{ u{bits} v[{}] = {{{}}}; memcpy({at}, v, sizeof v); }}", values.len(), values.join(", ")))
}

fn cvta(op: &Op<'_>) -> TranslateResult<String> {
    let value = op.bits(1)?;
    let kind = op.kind()?.to_owned();
    let value = match (op.in_shared(), op.has("to")) {
        (true, true) => format!("(u64)(u32)((u8 *){value} - t->block->shared)"),
        (true, false) => format!("(u64)(t->block->shared + (u32)({value}))"),
        // In the other state spaces the address is the generic address.
        (false, _) => value,
    };
    op.write(&kind, &value)
}

fn call(op: &Op<'_>) -> TranslateResult<String> {
    let mut arguments = Vec::new();
    let mut name = None;
    for operand in op.operands {
        match operand {
            Operand::Vector(all) => {
                for one in all {
                    let Operand::Name(one) = one else { return Err("an argument without a name".to_owned()) };
                    arguments.push(symbol(one));
                }
            }
            Operand::Name(n) if name.is_none() => name = Some(n.clone()),
            _ => return Err("unsupported form of a call".to_owned()),
        }
    }
    let name = name.ok_or("a call without a function")?;
    match name.as_str() {
        // A failed device assertion.
        "__assertfail" => {
            Ok("fprintf(stderr, \"cuda-on-cpu: an assertion of a kernel failed\\n\"); abort();".to_owned())
        }
        // printf: the output is discarded.
        "vprintf" => Ok(String::new()),
        _ if op.writer.has_function(&name) => {
            let all: String = arguments.iter().map(|a| format!(", {a}")).collect();
            Ok(format!("{}(t{all});", symbol(&name)))
        }
        _ => Err(format!("`{name}` is unknown")),
    }
}

fn copy_async(op: &Op<'_>) -> TranslateResult<String> {
    // Copies are executed at once, so there is nothing to wait for.
    if !op.has("async") || op.has("bulk") {
        return Err("not supported".to_owned());
    }
    if op.has("mbarrier") {
        // Earlier copies have finished. Without `noinc` the instruction also raises the pending count, so the two cancel out.
        let at = op.address(op.operand(0)?, op.in_shared())?;
        return Ok(if op.has("noinc") { format!("mbarrier_arrive((u64 *){at}, 1);") } else { String::new() });
    }
    if op.has("commit_group") || op.has("wait_group") || op.has("wait_all") {
        return Ok(String::new());
    }
    let to = op.address(op.operand(0)?, true)?;
    let from = op.address(op.operand(1)?, false)?;
    let size = op.bits(2)?;
    let taken = if op.operands.len() > 3 { op.bits(3)? } else { size.clone() };
    Ok(format!("{{ u8 *to = {to}; u32 n = (u32){taken}; memset(to, 0, {size}); if (n) memcpy(to, {from}, n); }}"))
}
