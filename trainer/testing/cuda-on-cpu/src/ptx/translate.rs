//! Translates a module to C. Registers become unsigned integers of the same width; each instruction interprets their bits.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::instruction;
use super::syntax::{Function, Operand, Statement, Unit, Variable, bytes_of};

/// A kernel of the translated module.
#[derive(Debug)]
pub struct Kernel {
    /// Name in PTX. The C function that runs a grid is called `run_` followed by the name's [`symbol`].
    pub name: String,
    /// Offset and size of each parameter.
    pub parameters: Vec<(usize, usize)>,
    /// Bytes of the block of parameters.
    pub parameter_bytes: usize,
    /// Bytes of static shared memory.
    pub shared: usize,
}

/// Returns the C text of a module and its kernels.
///
/// # Errors
/// An unknown or unsupported instruction, register or variable, with its text.
pub fn translate(unit: &Unit) -> Result<(String, Vec<Kernel>), String> {
    let mut text = String::from(concat!(include_str!("runtime.h"), include_str!("matrix.h")));
    let mut shared = Shared::default();
    for variable in &unit.variables {
        if variable.space == "shared" {
            shared.place(variable);
        } else {
            text.push_str(&define(variable, "static ")?);
        }
    }
    for function in unit.functions.iter().filter(|f| !f.entry) {
        let _ = writeln!(text, "{};", head(function));
    }
    let mut kernels = Vec::new();
    for function in &unit.functions {
        text.push_str(&Writer::new(unit, function, &mut shared).write()?);
    }
    // A device function may wait too, so all kernels of the module use fibers if any function waits.
    let may_yield = unit.functions.iter().any(|f| f.body.iter().any(may_yield));
    let has_system_scope = unit.functions.iter().any(|f| f.body.iter().any(has_system_scope));
    for function in unit.functions.iter().filter(|f| f.entry) {
        let (parameters, parameter_bytes) = layout(&function.parameters);
        let (name, bytes) = (symbol(&function.name), shared.bytes);
        let _ = writeln!(
            text,
            "void run_{name}(const u8 *params, const u32 *grid, const u32 *ntid, u32 dynamic, u8 *stacks) {{ \
             run_grid({name}, {}, {}, params, grid, ntid, {bytes}, dynamic, stacks); }}",
            u32::from(may_yield),
            u32::from(has_system_scope)
        );
        kernels.push(Kernel { name: function.name.clone(), parameters, parameter_bytes, shared: bytes });
    }
    Ok((text, kernels))
}

/// Returns whether an instruction may yield to other threads of the block.
fn may_yield(statement: &Statement) -> bool {
    let Statement::Instruction(i) = statement else { return false };
    let has = |what: &str| i.op.iter().any(|part| part == what);
    matches!(
        i.op[0].as_str(),
        "bar" | "barrier" | "shfl" | "vote" | "match" | "redux" | "mma" | "wmma" | "ldmatrix" | "stmatrix"
    ) || has("volatile")
        || has("acquire")
        || has("relaxed")
        || i.op[0] == "elect"
        || i.op[0] == "mbarrier"
}

/// Returns whether an instruction synchronizes with other processes: its scope is the system.
fn has_system_scope(statement: &Statement) -> bool {
    matches!(statement, Statement::Instruction(i) if i.op.iter().any(|part| part == "sys"))
}

/// Converts a PTX name to a C identifier.
pub fn symbol(name: &str) -> String {
    let mut made = String::from("p_");
    for c in name.chars() {
        match c {
            '%' => made.push_str("R_"),
            '$' => made.push_str("L_"),
            '.' => made.push('_'),
            _ => made.push(c),
        }
    }
    made
}

/// Layout of shared memory: variables in declaration order, followed by dynamic shared memory.
#[derive(Default)]
struct Shared {
    bytes: usize,
    offsets: BTreeMap<String, Option<usize>>,
}

impl Shared {
    fn place(&mut self, variable: &Variable) {
        if variable.external || variable.bytes == 0 {
            self.offsets.insert(variable.name.clone(), None);
            return;
        }
        let at = self.bytes.next_multiple_of(variable.align.max(16));
        self.offsets.insert(variable.name.clone(), Some(at));
        // Keeps the next variable aligned for every type.
        self.bytes = (at + variable.bytes).next_multiple_of(1024);
    }
}

fn define(variable: &Variable, prefix: &str) -> Result<String, String> {
    let name = symbol(&variable.name);
    let align = variable.align.max(8);
    if variable.external {
        return Err(format!("{} is declared .extern", variable.name));
    }
    let values: Vec<String> = variable.value.iter().map(u8::to_string).collect();
    let value = if values.is_empty() { String::new() } else { format!(" = {{{}}}", values.join(",")) };
    Ok(format!("{prefix}u8 {name}[{}] __attribute__((aligned({align}), unused)){value};\n", variable.bytes.max(1)))
}

/// Returns offset and size of each parameter, and the total bytes.
fn layout(parameters: &[Variable]) -> (Vec<(usize, usize)>, usize) {
    let mut end = 0_usize;
    let placed = parameters.iter().map(|p| {
        let at = end.next_multiple_of(p.align.max(1));
        end = at + p.bytes;
        (at, p.bytes)
    });
    (placed.collect(), end)
}

fn head(function: &Function) -> String {
    let name = symbol(&function.name);
    if function.entry {
        return format!("static void {name}(Thread *t)");
    }
    let arguments = function.results.iter().chain(&function.parameters).map(|p| format!(", u8 *{}", symbol(&p.name)));
    format!("static __attribute__((unused)) void {name}(Thread *t{})", arguments.collect::<String>())
}

/// Writes one function.
pub(super) struct Writer<'a> {
    unit: &'a Unit,
    function: &'a Function,
    shared: &'a mut Shared,
    /// Types of registers by name.
    registers: BTreeMap<String, String>,
    /// Names of `.local`, `.param` and module variables. As an operand, such a name is an address.
    memory: BTreeSet<String>,
    targets: BTreeMap<String, Vec<String>>,
    parameters: BTreeMap<String, String>,
}

impl<'a> Writer<'a> {
    fn new(unit: &'a Unit, function: &'a Function, shared: &'a mut Shared) -> Self {
        let mut memory: BTreeSet<_> =
            unit.variables.iter().filter(|v| v.space != "shared").map(|v| v.name.clone()).collect();
        let mut parameters = BTreeMap::new();
        if function.entry {
            for (variable, (at, _)) in function.parameters.iter().zip(layout(&function.parameters).0) {
                parameters.insert(variable.name.clone(), format!("(t->block->params + {at})"));
            }
        } else {
            memory.extend(function.results.iter().chain(&function.parameters).map(|p| p.name.clone()));
        }
        Self { unit, function, shared, registers: BTreeMap::new(), memory, targets: BTreeMap::new(), parameters }
    }

    fn write(mut self) -> Result<String, String> {
        let function = self.function;
        for statement in &function.body {
            if let Statement::Targets(name, labels) = statement {
                self.targets.insert(name.clone(), labels.clone());
            }
        }
        let mut text = format!("{} {{\n", head(function));
        for statement in &function.body {
            match statement {
                Statement::Open => text.push_str("{\n"),
                Statement::Close => text.push_str(";}\n"),
                Statement::Label(name) => {
                    let _ = writeln!(text, "{}: ;", symbol(name));
                }
                Statement::Targets(..) => {}
                Statement::Registers(kind, names) => {
                    let bits = 8 * bytes_of(kind).ok_or_else(|| format!("a register of type {kind}"))?;
                    for (name, count) in names {
                        let all: Vec<String> = match count {
                            Some(count) => (0..*count).map(|i| format!("{name}{i}")).collect(),
                            None => vec![name.clone()],
                        };
                        let declared: Vec<String> = all.iter().map(|name| format!("{} = 0", symbol(name))).collect();
                        if !declared.is_empty() {
                            let _ = writeln!(text, "u{bits} {};", declared.join(", "));
                        }
                        self.registers.extend(all.into_iter().map(|name| (name, kind.clone())));
                    }
                }
                Statement::Variable(variable) if variable.space == "shared" => self.shared.place(variable),
                Statement::Variable(variable) => {
                    let fixed = if matches!(variable.space.as_str(), "global" | "const") { "static " } else { "" };
                    text.push_str(&define(variable, fixed)?);
                    self.memory.insert(variable.name.clone());
                }
                Statement::Instruction(i) => {
                    let code = instruction::write(&self, i)
                        .map_err(|what| format!("{what}: {} {:?} in {}", i.op.join("."), i.operands, function.name))?;
                    match &i.guard {
                        Some((p, not)) => {
                            let _ = writeln!(text, "if ({}{}) {{ {code} }}", if *not { "!" } else { "" }, symbol(p));
                        }
                        None => {
                            let _ = writeln!(text, "{code}");
                        }
                    }
                }
            }
        }
        text.push_str(";}\n");
        Ok(text)
    }

    /// Returns the bytes of a register.
    pub(super) fn width(&self, name: &str) -> Option<usize> {
        self.registers.get(name).and_then(|kind| bytes_of(kind))
    }

    /// Returns the labels of a branch table.
    pub(super) fn targets(&self, name: &str) -> Option<&[String]> {
        self.targets.get(name).map(Vec::as_slice)
    }

    /// Returns whether the module defines a function of this name.
    pub(super) fn has_function(&self, name: &str) -> bool {
        self.unit.functions.iter().any(|f| f.name == name)
    }

    /// Returns the address of a variable: the offset for shared memory, otherwise the host address.
    pub(super) fn address_of(&self, name: &str) -> Option<String> {
        if let Some(place) = self.shared.offsets.get(name) {
            return Some(match place {
                Some(at) => format!("{at}u"),
                None => "t->block->static_bytes".to_owned(),
            });
        }
        if let Some(at) = self.parameters.get(name) {
            return Some(format!("(u64){at}"));
        }
        self.memory.contains(name).then(|| format!("(u64){}", symbol(name)))
    }

    /// Returns the C expression of an operand's bits.
    pub(super) fn value(&self, operand: &Operand) -> Result<String, String> {
        Ok(match operand {
            Operand::Name(name) => {
                if self.registers.contains_key(name) {
                    symbol(name)
                } else if let Some(special) = special(name) {
                    special
                } else if let Some(address) = self.address_of(name) {
                    address
                } else {
                    return Err(format!("`{name}` is unknown"));
                }
            }
            Operand::Not(name) => format!("!{}", symbol(name)),
            Operand::Integer(n) if *n < 0 => format!("((s64){n}ll)"),
            Operand::Integer(n) => format!("{n}ull"),
            Operand::F32(bits) => format!("{bits}u"),
            Operand::F64(bits) => format!("{bits}ull"),
            other => return Err(format!("{other:?} is not a value")),
        })
    }
}

fn special(name: &str) -> Option<String> {
    let axis = |array: &str, name: &str| {
        let index = match name.rsplit('.').next()? {
            "x" => 0,
            "y" => 1,
            "z" => 2,
            _ => return None,
        };
        Some(format!("{array}[{index}]"))
    };
    let lane = "t->lane";
    Some(match name {
        "%laneid" => lane.to_owned(),
        "%warpid" => "(t->linear / 32)".to_owned(),
        "%nwarpid" => "((t->block->threads + 31) / 32)".to_owned(),
        "%lanemask_eq" => format!("(1u << {lane})"),
        "%lanemask_lt" => format!("((1u << {lane}) - 1)"),
        "%lanemask_le" => format!("((2u << {lane}) - 1)"),
        "%lanemask_gt" => format!("~((2u << {lane}) - 1)"),
        "%lanemask_ge" => format!("~((1u << {lane}) - 1)"),
        "%clock" | "%clock_hi" | "%globaltimer_lo" => "(u32)nanoseconds()".to_owned(),
        "%clock64" | "%globaltimer" => "nanoseconds()".to_owned(),
        "%dynamic_smem_size" => "t->block->dynamic_bytes".to_owned(),
        "%total_smem_size" => "(t->block->static_bytes + t->block->dynamic_bytes)".to_owned(),
        "%smid" | "%gridid" | "%cluster_ctarank" => "0u".to_owned(),
        "%nsmid" | "%cluster_nctarank" => "1u".to_owned(),
        "WARP_SZ" => "32u".to_owned(),
        _ if name.starts_with("%tid.") => axis("t->tid", name)?,
        _ if name.starts_with("%ntid.") => axis("t->block->ntid", name)?,
        _ if name.starts_with("%ctaid.") || name.starts_with("%clusterid.") => axis("t->block->ctaid", name)?,
        _ if name.starts_with("%nctaid.") || name.starts_with("%nclusterid.") => axis("t->block->nctaid", name)?,
        _ if name.starts_with("%cluster_ctaid.") => "0u".to_owned(),
        _ if name.starts_with("%cluster_nctaid.") => "1u".to_owned(),
        _ => return None,
    })
}
