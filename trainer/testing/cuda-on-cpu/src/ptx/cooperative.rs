//! Translates instructions in which threads cooperate: barriers, warp instructions, matrix instructions, atomics.

use super::instruction::{Op, TranslateResult};
use super::syntax::{Operand, bytes_of};

/// Translates an instruction; returns `None` for other instructions.
pub(super) fn write(op: &Op<'_>) -> TranslateResult<Option<String>> {
    Ok(Some(match op.name() {
        "bar" | "barrier" => {
            if op.has("warp") {
                format!("sync_warp(t, (u32){});", op.bits(0)?)
            } else if op.has("sync") || op.has("cta") && op.has("aligned") {
                let count = if op.operands.len() > 1 { op.bits(1)? } else { "0".to_owned() };
                format!("barrier(t, (u32){}, (u32){count});", op.bits(0)?)
            } else if op.has("cluster") {
                // A cluster has one block here.
                if op.has("arrive") { String::new() } else { "barrier(t, 0, 0);".to_owned() }
            } else {
                return Err("not supported".to_owned());
            }
        }
        "shfl" => shuffle(op)?,
        "vote" => {
            let ballot = |p: &str, mask: &str| format!("ballot(t, {p}, (u32){mask})");
            let (p, mask) = (op.bits(1)?, op.bits(2)?);
            match op.parts.get(2).map(String::as_str) {
                Some("ballot") => op.write("b32", &ballot(&format!("{p} != 0"), &mask))?,
                Some("any") => op.write("pred", &ballot(&format!("{p} != 0"), &mask))?,
                Some("all") => op.write("pred", &format!("{} == 0", ballot(&format!("{p} == 0"), &mask)))?,
                _ => return Err("not supported".to_owned()),
            }
        }
        "activemask" => op.write("b32", "t->block->fibers ? t->warp->live : 0xffffffff")?,
        "elect" => {
            let Operand::Pair(lane, p) = op.operand(0)? else { return Err("expected a pair".to_owned()) };
            let mask = op.bits(1)?;
            let lane = op.write_operand(&Operand::Name(lane.clone()), "b32", "first")?;
            let p = op.write_operand(&Operand::Name(p.clone()), "pred", "first == t->lane")?;
            format!("{{ u32 first = (u32)__builtin_ctz((u32){mask}); sync_warp(t, (u32){mask}); {lane} {p} }}")
        }
        "redux" => {
            let kind = op.kind()?.to_owned();
            let how = match op.parts.get(2).map(String::as_str) {
                Some("add") => '+',
                Some("and") => '&',
                Some("or") => '|',
                Some("xor") => '^',
                Some("min") => '<',
                Some("max") => '>',
                _ => return Err("not supported".to_owned()),
            };
            let signed = u32::from(kind.starts_with('s'));
            op.write("b32", &format!("reduce_lanes(t, '{how}', {signed}, {}, (u32){})", op.bits(1)?, op.bits(2)?))?
        }
        "ldmatrix" | "stmatrix" => matrices(op)?,
        "mma" => mma(op)?,
        "mbarrier" => mbarrier(op)?,
        "wmma" => wmma(op)?,
        _ => return Ok(None),
    }))
}

fn shuffle(op: &Op<'_>) -> TranslateResult<String> {
    let mode = match op.parts.get(2).map(String::as_str) {
        Some("up") => 'u',
        Some("down") => 'd',
        Some("bfly") => 'b',
        Some("idx") => 'i',
        _ => return Err("not supported".to_owned()),
    };
    let mask = if op.operands.len() > 4 { op.bits(4)? } else { "0xffffffff".to_owned() };
    let (a, b, c) = (op.bits(1)?, op.bits(2)?, op.bits(3)?);
    let call = format!("shuffle(t, '{mode}', (u32){a}, (u32){b}, (u32){c}, (u32){mask}, &inside)");
    let (to, predicate) = match op.operand(0)? {
        Operand::Pair(d, p) => {
            (Operand::Name(d.clone()), op.write_operand(&Operand::Name(p.clone()), "pred", "inside")?)
        }
        one => (one.clone(), String::new()),
    };
    Ok(format!("{{ u8 inside; u32 v = {call}; {} {predicate} }}", op.write_operand(&to, "b32", "v")?))
}

/// Translates barriers in shared memory. Asynchronous copies that such a barrier tracks are executed at once.
fn mbarrier(op: &Op<'_>) -> TranslateResult<String> {
    if op.has("expect_tx") || op.has("complete_tx") || op.has("cluster") || op.has("remote") {
        return Err("not supported".to_owned());
    }
    let at = |index: usize| -> TranslateResult<String> {
        Ok(format!("(u64 *){}", op.address(op.operand(index)?, op.in_shared())?))
    };
    Ok(match op.parts[1].as_str() {
        "init" => format!("mbarrier_init({}, (u32){});", at(0)?, op.bits(1)?),
        "inval" => String::new(),
        "arrive" => {
            let count = if op.operands.len() > 2 { op.bits(2)? } else { "1".to_owned() };
            op.write("b64", &format!("mbarrier_arrive({}, (u32){count})", at(1)?))?
        }
        "test_wait" | "try_wait" => {
            let over = if op.has("parity") { op.bits(2)? } else { format!("(u64){} >> 63", op.bits(2)?) };
            let done = op.write("pred", &format!("mbarrier_phase({}) != ({over})", at(1)?))?;
            format!("t->polls |= 15; poll_memory(t); {done}")
        }
        _ => return Err("not supported".to_owned()),
    })
}

fn registers(operand: &Operand) -> &[Operand] {
    match operand {
        Operand::Vector(all) => all,
        one => std::slice::from_ref(one),
    }
}

/// Returns `u32 name[8] = {…};` with a fragment's registers.
fn array(op: &Op<'_>, name: &str, index: usize) -> TranslateResult<String> {
    let values: TranslateResult<Vec<String>> =
        registers(op.operand(index)?).iter().map(|r| op.writer.value(r)).collect();
    let values: Vec<String> = values?.into_iter().map(|v| format!("(u32){v}")).collect();
    Ok(format!("u32 {name}[8] = {{{}}}; ", values.join(", ")))
}

/// Assigns the elements of `d` to a fragment's registers.
fn unpack(op: &Op<'_>, index: usize) -> TranslateResult<String> {
    let mut code = String::new();
    for (i, register) in registers(op.operand(index)?).iter().enumerate() {
        code += &op.write_operand(register, "b32", &format!("d[{i}]"))?;
    }
    Ok(code)
}

fn matrices(op: &Op<'_>) -> TranslateResult<String> {
    if !op.has("b16") || !op.has("m8n8") {
        return Err("not supported".to_owned());
    }
    let count = ["x4", "x2", "x1"].iter().find(|x| op.has(x)).map_or("1", |x| &x[1..]);
    let trans = u32::from(op.has("trans"));
    if op.name() == "stmatrix" {
        let row = op.address(op.operand(0)?, op.in_shared())?;
        return Ok(format!("{{ {} stmatrix(t, {count}, {trans}, {row}, s); }}", array(op, "s", 1)?));
    }
    let row = op.address(op.operand(1)?, op.in_shared())?;
    Ok(format!("{{ u32 d[4]; ldmatrix(t, {count}, {trans}, {row}, d); {} }}", unpack(op, 0)?))
}

fn kind_of(name: &str) -> TranslateResult<&'static str> {
    Ok(match name {
        "f16" => "F16",
        "bf16" => "BF16",
        "tf32" => "TF32",
        "f32" => "FP32",
        other => return Err(format!("matrices of {other}")),
    })
}

fn mma(op: &Op<'_>) -> TranslateResult<String> {
    let shape = op.parts.iter().find_map(|p| p.strip_prefix("m16n8k")).ok_or("a shape that is not m16n8")?;
    let kinds = op.kinds();
    let [d, a, _, _] = kinds[..] else { return Err("not four types".to_owned()) };
    let (na, nb) = (registers(op.operand(1)?).len(), registers(op.operand(2)?).len());
    Ok(format!(
        "{{ {}{}{}u32 d[4]; mma_m16n8(t, {shape}, {}, {}, d, a, {na}, b, {nb}, c); {} }}",
        array(op, "a", 1)?,
        array(op, "b", 2)?,
        array(op, "c", 3)?,
        kind_of(a)?,
        kind_of(d)?,
        unpack(op, 0)?
    ))
}

/// Returns m, n and k of `m16n16k16`.
fn shape(op: &Op<'_>) -> TranslateResult<[u32; 3]> {
    let read = |part: &String| {
        let (m, rest) = part.strip_prefix('m')?.split_once('n')?;
        let (n, k) = rest.split_once('k')?;
        Some([m.parse().ok()?, n.parse().ok()?, k.parse().ok()?])
    };
    op.parts.iter().find_map(read).ok_or_else(|| "no shape".to_owned())
}

fn wmma(op: &Op<'_>) -> TranslateResult<String> {
    let [m, n, k] = shape(op)?;
    let what = op.parts[1].as_str();
    if what == "mma" {
        let kinds = op.kinds();
        // `.f32.f32` with f16 matrices names two types, the other forms all four.
        let (d, a, c) = match kinds[..] {
            [d, c] => (d, "f16", c),
            [d, a, _, c] => (d, a, c),
            _ => return Err("not two or four types".to_owned()),
        };
        if !op.has("row") && !op.has("col") {
            return Err("no layout".to_owned());
        }
        return Ok(format!(
            "{{ {}{}{}u32 d[8]; wmma_mma(t, {m}, {n}, {k}, {}, {}, {}, d, a, b, c); {} }}",
            array(op, "a", 1)?,
            array(op, "b", 2)?,
            array(op, "c", 3)?,
            kind_of(a)?,
            kind_of(c)?,
            kind_of(d)?,
            unpack(op, 0)?
        ));
    }
    let (rows, columns) = match op.parts[2].as_str() {
        "a" => (m, k),
        "b" => (k, n),
        _ => (m, n),
    };
    let kind = kind_of(op.kind()?)?;
    let row_major = u32::from(op.has("row"));
    let stride = if op.operands.len() > 2 {
        op.bits(2)?
    } else if row_major == 1 {
        columns.to_string()
    } else {
        rows.to_string()
    };
    if what == "store" {
        let to = op.address(op.operand(0)?, op.in_shared())?;
        return Ok(format!(
            "{{ {} wmma_store(t, {rows}, {columns}, {kind}, {row_major}, {to}, (u32){stride}, s); }}",
            array(op, "s", 1)?
        ));
    }
    let from = op.address(op.operand(1)?, op.in_shared())?;
    let count = registers(op.operand(0)?).len();
    Ok(format!(
        "{{ u32 d[8]; wmma_load(t, {rows}, {columns}, {kind}, {row_major}, {from}, (u32){stride}, d, {count}); {} }}",
        unpack(op, 0)?
    ))
}

/// Translates `atom` and `red` to a compare-and-swap loop.
pub(super) fn atomic(op: &Op<'_>) -> TranslateResult<String> {
    let kind = op.kind()?.to_owned();
    let bytes = bytes_of(&kind).unwrap_or(4);
    let first = usize::from(op.name() == "atom");
    let at = op.address(op.operand(first)?, op.in_shared())?;
    let known = ["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"];
    let how = op.parts[1..].iter().find(|p| known.contains(&p.as_str())).ok_or("not supported")?;
    if matches!(kind.as_str(), "f16x2" | "bf16x2" | "b128") || matches!(op.operand(first)?, Operand::Vector(_)) {
        return Err("not supported".to_owned());
    }
    let plain = if kind.starts_with('b') && !kind.starts_with("bf") { format!("b{}", 8 * bytes) } else { kind.clone() };
    let old = super::instruction::read_bits("old", &plain);
    let v = op.read(first + 1, &plain)?;
    let new = match how.as_str() {
        "add" => format!("{old} + {v}"),
        "min" => format!("{old} < {v} ? {old} : {v}"),
        "max" => format!("{old} > {v} ? {old} : {v}"),
        "and" => format!("{old} & {v}"),
        "or" => format!("{old} | {v}"),
        "xor" => format!("{old} ^ {v}"),
        "exch" => v.clone(),
        "cas" => format!("{old} == {v} ? {} : {old}", op.read(first + 2, &plain)?),
        "inc" => format!("{old} >= {v} ? 0 : {old} + 1"),
        _ => format!("{old} == 0 || {old} > {v} ? {v} : {old} - 1"),
    };
    let new = super::instruction::write_bits(&new, &plain);
    let bits = 8 * bytes;
    let result = if first == 1 { op.write(&format!("b{bits}"), "old")? } else { String::new() };
    // Kernels wait for a lock in a loop of `cas`.
    let waits = if how == "cas" { "poll_memory(t); " } else { "" };
    Ok(format!(
        "{{ {waits}u{bits} *at = (u{bits} *){at}, old = __atomic_load_n(at, __ATOMIC_RELAXED), new; do new = {new}; \
         while (!__atomic_compare_exchange_n(at, &old, new, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)); {result} }}"
    ))
}
