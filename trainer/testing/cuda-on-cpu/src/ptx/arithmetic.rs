//! Arithmetic, logic, comparison and conversion.

use super::instruction::{Op, TranslateResult, read_bits, write_bits};
use super::syntax::{Operand, bytes_of};

pub(super) fn write(op: &Op<'_>) -> TranslateResult<String> {
    match op.name() {
        "cvt" => convert(op),
        "setp" | "set" => compare(op),
        "selp" => {
            let kind = op.kind()?.to_owned();
            let value = format!("{} ? {} : {}", op.bits(3)?, op.bits(1)?, op.bits(2)?);
            op.write(&format!("b{}", 8 * bytes_of(&kind).unwrap_or(4)), &value)
        }
        "slct" => {
            let test = format!("{} >= 0", op.read(3, op.kind()?)?);
            let kind = op.kinds()[0].to_owned();
            op.write(&kind, &format!("{test} ? {} : {}", op.read(1, &kind)?, op.read(2, &kind)?))
        }
        _ => {
            let kind = op.kind()?.to_owned();
            if kind == "f16x2" || kind == "bf16x2" {
                return packed(op, &kind);
            }
            match kind.as_str() {
                "f32" | "f64" | "f16" | "bf16" => floats(op, &kind),
                _ => integers(op, &kind),
            }
        }
    }
}

/// Applies an operation to both halves of a word.
fn packed(op: &Op<'_>, kind: &str) -> TranslateResult<String> {
    let half = &kind[..kind.len() - 2];
    let mut code = String::from("{ u32 out = 0; ");
    for shift in [0, 16] {
        let mut values = Vec::new();
        for index in 1..op.operands.len() {
            values.push(read_bits(&format!("(u16)(({}) >> {shift})", op.bits(index)?), half));
        }
        let value = float_value(op, half, &values)?;
        code += &format!("out |= (u32){} << {shift}; ", write_bits(&value, half));
    }
    Ok(code + &op.write("b32", "out")? + " }")
}

fn floats(op: &Op<'_>, kind: &str) -> TranslateResult<String> {
    let mut values = Vec::new();
    for index in 1..op.operands.len() {
        values.push(op.read(index, kind)?);
    }
    match op.name() {
        "and" | "or" | "xor" | "not" => return integers(op, kind),
        "neg" | "abs" if kind == "f32" || kind == "f64" => {}
        "testp" => {
            let value = &values[0];
            let test = match op.parts[1].as_str() {
                "finite" => format!("isfinite({value})"),
                "infinite" => format!("isinf({value})"),
                "number" => format!("!isnan({value})"),
                "notanumber" => format!("isnan({value})"),
                other => return Err(format!("testp.{other}")),
            };
            return op.write("pred", &test);
        }
        _ => {}
    }
    // Swapped: the sign comes from the first operand in PTX and from the second in C.
    if op.name() == "copysign" {
        values.swap(0, 1);
    }
    let value = float_value(op, kind, &values)?;
    op.write(kind, &if op.has("sat") { format!("saturate({value})") } else { value })
}

/// Returns the C expression of a float operation. 16-bit floats are computed in f32 and rounded once.
fn float_value(op: &Op<'_>, kind: &str, v: &[String]) -> TranslateResult<String> {
    let f = if kind == "f64" { "" } else { "f" };
    let value = match (op.name(), v) {
        ("add", [a, b]) => format!("({a} + {b})"),
        ("sub", [a, b]) => format!("({a} - {b})"),
        ("mul", [a, b]) => format!("({a} * {b})"),
        // In f64 the product of two 16-bit values is exact. The sum is rounded to f32 and then to 16 bits, so the last bit may
        // differ from a GPU's.
        ("fma" | "mad", [a, b, c]) if kind == "f16" || kind == "bf16" => format!("(f32)((f64){a} * {b} + {c})"),
        ("fma" | "mad", [a, b, c]) => format!("fma{f}({a}, {b}, {c})"),
        ("div", [a, b]) => format!("({a} / {b})"),
        ("neg", [a]) => format!("-({a})"),
        ("abs", [a]) => format!("fabs{f}({a})"),
        ("min", [a, b]) => format!("{}({a}, {b})", if op.has("NaN") { "min_nan" } else { "min_num" }),
        ("max", [a, b]) => format!("{}({a}, {b})", if op.has("NaN") { "max_nan" } else { "max_num" }),
        ("min", [a, b, c]) => format!("min_num({a}, min_num({b}, {c}))"),
        ("max", [a, b, c]) => format!("max_num({a}, max_num({b}, {c}))"),
        ("sqrt", [a]) => format!("sqrt{f}({a})"),
        ("rsqrt", [a]) => format!("(1 / sqrt{f}({a}))"),
        ("rcp", [a]) => format!("(1 / {a})"),
        ("ex2", [a]) => format!("exp2{f}({a})"),
        ("lg2", [a]) => format!("log2{f}({a})"),
        ("sin", [a]) => format!("sin{f}({a})"),
        ("cos", [a]) => format!("cos{f}({a})"),
        ("tanh", [a]) => format!("tanh{f}({a})"),
        ("copysign", [a, b]) => format!("copysign{f}({a}, {b})"),
        _ => return Err("not supported".to_owned()),
    };
    Ok(if op.has("relu") { format!("max_num({value}, 0)") } else { value })
}

fn integers(op: &Op<'_>, kind: &str) -> TranslateResult<String> {
    let bytes = bytes_of(kind).unwrap_or(4);
    let bits = if kind == "pred" { 1 } else { 8 * bytes };
    let signed = kind.starts_with('s');
    let raw = if kind == "pred" { "pred".to_owned() } else { format!("b{bits}") };
    let int = match kind.as_bytes()[0] {
        b's' | b'u' => kind.to_owned(),
        _ => raw.clone(),
    };
    let a = || op.read(1, &int);
    let b = || op.read(2, &int);
    let c = || op.read(3, &int);
    let word = |index: usize| op.read(index, "u32");
    let twice = format!("{}{}", if signed { "s" } else { "u" }, 2 * bits);
    let value = match op.name() {
        "add" if op.has("cc") => return Err("carries are not supported".to_owned()),
        "add" if op.has("sat") => format!("to_s32((f64){} + {})", a()?, b()?),
        "sub" if op.has("sat") => format!("to_s32((f64){} - {})", a()?, b()?),
        "add" => format!("({}) + ({})", a()?, b()?),
        "sub" => format!("({}) - ({})", a()?, b()?),
        "mul" | "mul24" if op.has("wide") => {
            return op.write(&twice, &format!("({twice})({}) * ({twice})({})", a()?, b()?));
        }
        "mul" if op.has("hi") => format!("(({twice})({}) * ({twice})({})) >> {bits}", a()?, b()?),
        // u64, because C promotes 16-bit factors to int, which may overflow.
        "mul" | "mul24" => format!("(u64)({}) * (u64)({})", a()?, b()?),
        "mad" | "mad24" if op.has("wide") => {
            let c = op.read(3, &twice)?;
            return op.write(&twice, &format!("({twice})({}) * ({twice})({}) + {c}", a()?, b()?));
        }
        "mad" if op.has("hi") => format!("((({twice})({}) * ({twice})({})) >> {bits}) + {}", a()?, b()?, c()?),
        "mad" | "mad24" => format!("(u64)({}) * (u64)({}) + (u64)({})", a()?, b()?, c()?),
        "sad" => format!("({2}) + (({0}) < ({1}) ? ({1}) - ({0}) : ({0}) - ({1}))", a()?, b()?, c()?),
        // Division by zero returns all bits set, as on GPUs.
        "div" => format!("({1}) == 0 ? ({int})-1 : ({0}) / ({1})", a()?, b()?),
        "rem" => format!("({1}) == 0 ? ({0}) : ({0}) % ({1})", a()?, b()?),
        "abs" => format!("({0}) < 0 ? -({0}) : ({0})", a()?),
        "neg" => format!("-({})", a()?),
        "min" => format!("({0}) < ({1}) ? ({0}) : ({1})", a()?, b()?),
        "max" => format!("({0}) > ({1}) ? ({0}) : ({1})", a()?, b()?),
        "and" => format!("({}) & ({})", a()?, b()?),
        "or" => format!("({}) | ({})", a()?, b()?),
        "xor" => format!("({}) ^ ({})", a()?, b()?),
        "not" if kind == "pred" => format!("!({})", a()?),
        "not" => format!("~({})", a()?),
        "cnot" => format!("({}) == 0", a()?),
        "shl" => format!("shift_left({}, {}, {bits})", a()?, word(2)?),
        "shr" if signed => format!("shift_right_signed({}, {}, {bits})", a()?, word(2)?),
        "shr" => format!("shift_right({}, {}, {bits})", a()?, word(2)?),
        "shf" => {
            let (left, wrap) = (u32::from(op.has("l")), u32::from(op.has("wrap")));
            format!("funnel({}, {}, {}, {left}, {wrap})", word(1)?, word(2)?, word(3)?)
        }
        "prmt" => format!("permute({}, {}, {})", word(1)?, word(2)?, word(3)?),
        "bfe" => format!("bit_field({}, {}, {}, {bits}, {})", a()?, word(2)?, word(3)?, u32::from(signed)),
        "bfi" => format!("bit_insert({}, {}, {}, {}, {bits})", a()?, b()?, word(3)?, word(4)?),
        "popc" => return op.write("u32", &format!("__builtin_popcountll({})", a()?)),
        "clz" => return op.write("u32", &format!("({0}) ? __builtin_clzll({0}) - {1} : {bits}", a()?, 64 - bits)),
        "brev" if bits == 32 => format!("reverse_bits({})", a()?),
        "bfind" if !signed => return op.write("u32", &format!("highest_bit({})", a()?)),
        "lop3" => format!("lop3({}, {}, {}, {})", word(1)?, word(2)?, word(3)?, word(4)?),
        "dp4a" => {
            let kinds = op.kinds();
            let sign = |i: usize| u32::from(kinds.get(i).is_some_and(|k| k.starts_with('s')));
            format!("dot4({}, {}, {}, {}, {})", word(1)?, word(2)?, word(3)?, sign(0), sign(1))
        }
        _ => return Err("not supported".to_owned()),
    };
    op.write(&int, &value)
}

fn compare(op: &Op<'_>) -> TranslateResult<String> {
    let kind = op.kinds().last().map(|k| (*k).to_owned()).ok_or("no type")?;
    let int = if kind.starts_with('b') && !kind.starts_with("bf") {
        format!("b{}", 8 * bytes_of(&kind).unwrap_or(4))
    } else {
        kind.clone()
    };
    let (a, b) = (op.read(1, &int)?, op.read(2, &int)?);
    let float = matches!(kind.as_str(), "f32" | "f64" | "f16" | "bf16");
    let relation = op.parts[1].as_str();
    let test = match relation {
        "num" => format!("!isnan({a}) && !isnan({b})"),
        "nan" => format!("isnan({a}) || isnan({b})"),
        _ => {
            // Unordered comparisons, which are true for NaN, end with u. lo, ls, hi and hs are unsigned comparisons of integers.
            let (base, unordered) = match relation {
                "equ" | "neu" | "ltu" | "leu" | "gtu" | "geu" => (&relation[..2], true),
                "lo" => ("lt", false),
                "ls" => ("le", false),
                "hi" => ("gt", false),
                "hs" => ("ge", false),
                _ => (relation, false),
            };
            let sign = match base {
                "eq" => "==",
                "ne" => "!=",
                "lt" => "<",
                "le" => "<=",
                "gt" => ">",
                "ge" => ">=",
                _ => return Err(format!("comparison {relation}")),
            };
            match (float, unordered, base) {
                (true, true, _) => format!("isnan({a}) || isnan({b}) || ({a}) {sign} ({b})"),
                (true, false, "ne") => format!("!isnan({a}) && !isnan({b}) && ({a}) != ({b})"),
                _ => format!("({a}) {sign} ({b})"),
            }
        }
    };
    let joined = op.parts[2..].iter().find(|p| matches!(p.as_str(), "and" | "or" | "xor"));
    let with = |test: &str| -> TranslateResult<String> {
        Ok(match joined.map(String::as_str) {
            Some("and") => format!("({test}) && {}", op.bits(3)?),
            Some("or") => format!("({test}) || {}", op.bits(3)?),
            Some(_) => format!("(({test}) != 0) ^ {}", op.bits(3)?),
            None => test.to_owned(),
        })
    };
    if op.name() == "set" {
        let to = op.kinds()[0].to_owned();
        let yes = if to == "f32" { "1.0f" } else { "-1" };
        return op.write(&to, &format!("({}) ? {yes} : 0", with(&test)?));
    }
    if let Operand::Pair(p, q) = op.operand(0)? {
        let (yes, no) = (with("test")?, with("!test")?);
        let p = op.write_operand(&Operand::Name(p.clone()), "pred", "yes")?;
        let q = op.write_operand(&Operand::Name(q.clone()), "pred", "no")?;
        return Ok(format!("{{ u8 test = (u8)({test}), yes = (u8)({yes}), no = (u8)({no}); {p} {q} }}"));
    }
    op.write("pred", &with(&test)?)
}

fn convert(op: &Op<'_>) -> TranslateResult<String> {
    let kinds = op.kinds();
    let (Some(&to), Some(&from)) = (kinds.first(), kinds.last()) else { return Err("no types".to_owned()) };
    if to == "f16x2" || to == "bf16x2" {
        // The first source is the upper half.
        let half = &to[..to.len() - 2];
        let relu = |value: String| if op.has("relu") { format!("max_num({value}, 0)") } else { value };
        let (upper, lower) = (relu(op.read(1, "f32")?), relu(op.read(2, "f32")?));
        return op.write("b32", &format!("(u32){} << 16 | {}", write_bits(&upper, half), write_bits(&lower, half)));
    }
    if to == "tf32" {
        return op.write("b32", &format!("of_tf32({})", op.read(1, "f32")?));
    }
    let is_float = |kind: &str| matches!(kind, "f16" | "bf16" | "f32" | "f64");
    let value = op.read(1, from)?;
    let round = |value: &str| {
        if op.has("rni") || (op.has("rn") && is_float(from) && !is_float(to)) {
            format!("rint({value})")
        } else if op.has("rzi") || (op.has("rz") && !is_float(to)) {
            format!("trunc({value})")
        } else if op.has("rmi") {
            format!("floor({value})")
        } else if op.has("rpi") {
            format!("ceil({value})")
        } else {
            value.to_owned()
        }
    };
    let made = match (is_float(to), is_float(from)) {
        (false, true) => format!("to_{to}({})", round(&value)),
        (true, true) if to == "f16" && from == "f64" => return op.write("b16", &format!("of_f16_from_f64({value})")),
        (true, true) => round(&value),
        (true, false) => format!("({})({value})", if to == "f64" { "f64" } else { "f32" }),
        (false, false) if op.has("sat") => format!("to_{to}((f64)({value}))"),
        (false, false) => format!("({to})({value})"),
    };
    op.write(to, &if op.has("sat") && is_float(to) { format!("saturate({made})") } else { made })
}
