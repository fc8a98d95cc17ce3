//! Parses PTX into statements. Unsupported syntax is an error that shows the text.

use super::lex::{Token, tokens};
use super::syntax::{Function, Instruction, Operand, Statement, Unit, Variable, bytes_of};

type ParseResult<T> = Result<T, String>;

/// Parses a module.
///
/// # Errors
///
/// Unsupported syntax, with the text.
pub fn parse(text: &str) -> ParseResult<Unit> {
    let mut reader = Reader { tokens: tokens(text), at: 0 };
    let mut unit = Unit::default();
    while let Some(word) = reader.word() {
        let mut word = word;
        let mut external = false;
        while matches!(word.as_str(), ".visible" | ".weak" | ".extern" | ".common" | ".internal") {
            external |= word == ".extern";
            word = reader.need_word()?;
        }
        match word.as_str() {
            ".entry" | ".func" => {
                if let Some(function) = reader.function(word == ".entry")? {
                    unit.functions.push(function);
                }
            }
            ".shared" | ".global" | ".const" => {
                let mut variable = reader.variable(&word[1..])?;
                variable.external = external;
                unit.variables.push(variable);
                reader.expect(";")?;
            }
            _ => return Err(reader.wrong(&format!("`{word}` outside a function"))),
        }
    }
    Ok(unit)
}

struct Reader {
    tokens: Vec<Token>,
    at: usize,
}

impl Reader {
    fn wrong(&self, what: &str) -> String {
        let near = self.tokens[self.at.saturating_sub(12)..self.tokens.len().min(self.at + 6)].join(" ");
        format!("{what}, near `{near}`")
    }

    fn peek(&self) -> &str {
        self.tokens.get(self.at).map_or("", String::as_str)
    }

    fn word(&mut self) -> Option<String> {
        let word = self.tokens.get(self.at).cloned();
        self.at += 1;
        word
    }

    fn need_word(&mut self) -> ParseResult<String> {
        self.word().ok_or_else(|| "the text ends too early".to_owned())
    }

    fn accept(&mut self, token: &str) -> bool {
        let yes = self.peek() == token;
        self.at += usize::from(yes);
        yes
    }

    fn expect(&mut self, token: &str) -> ParseResult<()> {
        if self.accept(token) {
            Ok(())
        } else {
            Err(self.wrong(&format!("expected `{token}`, found `{}`", self.peek())))
        }
    }

    fn number(&mut self) -> ParseResult<usize> {
        let word = self.need_word()?;
        integer(&word).and_then(|n| usize::try_from(n).ok()).ok_or_else(|| self.wrong("expected a number"))
    }

    /// Parses what follows the state space: `.align 4 .b8 name[12] = {…}`, up to the terminator.
    fn variable(&mut self, space: &str) -> ParseResult<Variable> {
        let mut made = Variable {
            space: space.to_owned(),
            name: String::new(),
            align: 0,
            bytes: 0,
            value: Vec::new(),
            external: false,
        };
        let mut element = 0;
        loop {
            let word = self.need_word()?;
            if word == ".align" {
                // For a pointer parameter (`.ptr .global .align 16`) this is the alignment of the target. A larger alignment is
                // harmless.
                made.align = self.number()?;
            } else if let Some(bytes) = word.strip_prefix('.').and_then(bytes_of) {
                element = bytes;
            } else if !word.starts_with('.') {
                made.name = word;
                break;
            }
        }
        let natural = element.max(1);
        made.align = made.align.max(natural);
        let mut count = 1;
        while self.accept("[") {
            count *= if self.peek() == "]" { 0 } else { self.number()? };
            self.expect("]")?;
        }
        made.bytes = element * count;
        if self.accept("=") {
            let braces = self.accept("{");
            loop {
                let sign = if self.accept("-") { -1 } else { 1 };
                let word = self.need_word()?;
                let value = match immediate(&word) {
                    Some(Operand::Integer(n)) => sign * n,
                    Some(Operand::F32(bits)) => i128::from(bits),
                    Some(Operand::F64(bits)) => i128::from(bits),
                    _ => return Err(self.wrong("an initial value that is not a number")),
                };
                made.value.extend(&value.to_le_bytes()[..element]);
                if !self.accept(",") {
                    break;
                }
            }
            if braces {
                self.expect("}")?;
            }
        }
        Ok(made)
    }

    fn parameters(&mut self) -> ParseResult<Vec<Variable>> {
        let mut all = Vec::new();
        if !self.accept("(") {
            return Ok(all);
        }
        while !self.accept(")") {
            let space = self.need_word()?;
            if space != ".param" && space != ".reg" {
                return Err(self.wrong("expected a parameter"));
            }
            all.push(self.variable("param")?);
            self.accept(",");
        }
        Ok(all)
    }

    /// Parses a function. Returns `None` for a declaration without a body.
    fn function(&mut self, entry: bool) -> ParseResult<Option<Function>> {
        let results = if entry { Vec::new() } else { self.parameters()? };
        let name = self.need_word()?;
        let parameters = self.parameters()?;
        // Performance directives.
        while self.peek() != "{" {
            if self.need_word()? == ";" {
                return Ok(None);
            }
        }
        self.expect("{")?;
        let mut body = Vec::new();
        let mut depth = 1;
        while depth > 0 {
            match self.statement()? {
                None => {}
                Some(statement) => {
                    match statement {
                        Statement::Open => depth += 1,
                        Statement::Close => depth -= 1,
                        _ => {}
                    }
                    if depth > 0 {
                        body.push(statement);
                    }
                }
            }
        }
        Ok(Some(Function { entry, name, parameters, results, body }))
    }

    fn statement(&mut self) -> ParseResult<Option<Statement>> {
        let word = self.need_word()?;
        Ok(Some(match word.as_str() {
            "{" => Statement::Open,
            "}" => Statement::Close,
            ";" => return Ok(None),
            ".pragma" => {
                while self.need_word()? != ";" {}
                return Ok(None);
            }
            ".reg" => {
                let kind = self.need_word()?[1..].to_owned();
                let mut names = Vec::new();
                loop {
                    let name = self.need_word()?;
                    let count = if self.accept("<") {
                        let count = self.number()?;
                        self.expect(">")?;
                        Some(count)
                    } else {
                        None
                    };
                    names.push((name, count));
                    if !self.accept(",") {
                        break;
                    }
                }
                self.expect(";")?;
                Statement::Registers(kind, names)
            }
            ".shared" | ".local" | ".param" | ".global" | ".const" => {
                let variable = self.variable(&word[1..])?;
                self.expect(";")?;
                Statement::Variable(variable)
            }
            _ if self.peek() == ":" && !word.starts_with('@') => {
                self.at += 1;
                if self.accept(".branchtargets") {
                    let mut labels = Vec::new();
                    while !self.accept(";") {
                        labels.push(self.need_word()?);
                        self.accept(",");
                    }
                    Statement::Targets(word, labels)
                } else {
                    Statement::Label(word)
                }
            }
            _ => Statement::Instruction(self.instruction(word)?),
        }))
    }

    fn instruction(&mut self, first: String) -> ParseResult<Instruction> {
        let (guard, op) = if first == "@" {
            let not = self.accept("!");
            (Some((self.need_word()?, not)), self.need_word()?)
        } else {
            (None, first)
        };
        let mut operands = Vec::new();
        while !self.accept(";") {
            operands.push(self.operand()?);
            if !self.accept(",") {
                self.expect(";")?;
                break;
            }
        }
        Ok(Instruction { guard, op: op.split('.').map(str::to_owned).collect(), operands })
    }

    fn list(&mut self, end: &str) -> ParseResult<Operand> {
        let mut all = Vec::new();
        while !self.accept(end) {
            all.push(self.operand()?);
            self.accept(",");
        }
        Ok(Operand::Vector(all))
    }

    fn operand(&mut self) -> ParseResult<Operand> {
        let word = self.need_word()?;
        match word.as_str() {
            "{" => return self.list("}"),
            "(" => return self.list(")"),
            "!" => return Ok(Operand::Not(self.need_word()?)),
            "-" => {
                let word = self.need_word()?;
                return match immediate(&word) {
                    Some(Operand::Integer(n)) => Ok(Operand::Integer(-n)),
                    _ => Err(self.wrong("expected a number")),
                };
            }
            "[" => {
                let base = self.need_word()?;
                let (base, mut offset) = match integer(&base) {
                    Some(n) => (String::new(), n as i64),
                    None => (base, 0),
                };
                while !self.accept("]") {
                    let sign = match self.need_word()?.as_str() {
                        "+" if self.accept("-") => -1,
                        "+" => 1,
                        "-" => -1,
                        _ => return Err(self.wrong("an address that is not base+offset")),
                    };
                    offset += sign * self.number()? as i64;
                }
                return Ok(Operand::Address(base, offset));
            }
            _ => {}
        }
        if let Some(value) = immediate(&word) {
            return Ok(value);
        }
        if self.accept("|") {
            return Ok(Operand::Pair(word, self.need_word()?));
        }
        Ok(Operand::Name(word))
    }
}

fn integer(word: &str) -> Option<i128> {
    let word = word.strip_suffix('U').unwrap_or(word);
    match word.strip_prefix("0x").or(word.strip_prefix("0X")) {
        Some(hex) => i128::from_str_radix(hex, 16).ok(),
        None => word.parse().ok(),
    }
}

fn immediate(word: &str) -> Option<Operand> {
    if let Some(bits) = word.strip_prefix("0f").or(word.strip_prefix("0F")) {
        return u32::from_str_radix(bits, 16).ok().map(Operand::F32);
    }
    if let Some(bits) = word.strip_prefix("0d").or(word.strip_prefix("0D")) {
        return u64::from_str_radix(bits, 16).ok().map(Operand::F64);
    }
    integer(word).map(Operand::Integer)
}
