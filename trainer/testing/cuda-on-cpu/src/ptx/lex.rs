//! Tokens of PTX.

/// A word, including its dots (`ld.global.u32`, `%tid.x`, `.reg`), or one punctuation character.
pub type Token = String;

/// Splits a module's text into tokens. Comments, debug information and the header are left out.
pub fn tokens(text: &str) -> Vec<Token> {
    let mut all = Vec::new();
    let mut section = false;
    let mut comment = false;
    for line in text.lines() {
        let mut line = line.trim();
        if comment {
            match line.split_once("*/") {
                Some((_, rest)) => (line, comment) = (rest.trim(), false),
                None => continue,
            }
        }
        let uncommented;
        if line.contains("/*") {
            let mut kept = String::new();
            let mut rest = line;
            while let Some((before, inside)) = rest.split_once("/*") {
                kept.push_str(before);
                match inside.split_once("*/") {
                    Some((_, after)) => rest = after,
                    None => (rest, comment) = ("", true),
                }
            }
            kept.push_str(rest);
            uncommented = kept;
            line = uncommented.trim();
        }
        let line = line.split("//").next().unwrap_or_default().trim();
        if section {
            section = !line.starts_with('}');
            continue;
        }
        if line.starts_with(".section") {
            section = true;
            continue;
        }
        // Compare the whole first word: `.local` is not `.loc`.
        let first = line.split_ascii_whitespace().next().unwrap_or_default();
        if [".version", ".target", ".address_size", ".file", ".loc"].contains(&first) {
            continue;
        }
        cut(line, &mut all);
    }
    all
}

fn cut(line: &str, all: &mut Vec<Token>) {
    let bytes = line.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        if bytes[at].is_ascii_whitespace() {
            at += 1;
            continue;
        }
        if bytes[at] == b'"' {
            at = line[at + 1..].find('"').map_or(bytes.len(), |end| at + end + 2);
            all.push(line[start..at].to_owned());
            continue;
        }
        while at < bytes.len() {
            // `shared::cta` and `.L1::no_allocate` are single words.
            if bytes[at..].starts_with(b"::") {
                at += 2;
            } else if bytes[at].is_ascii_alphanumeric() || b"_$%.".contains(&bytes[at]) {
                at += 1;
            } else {
                break;
            }
        }
        if at == start {
            at += 1;
        }
        all.push(line[start..at].to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::tokens;

    #[test]
    fn words_keep_their_dots_and_lines_about_the_source_are_left_out() {
        let text = ".version 8.0 // of the text\n.loc 1 2 3\n.local .align 4 .b8 x[8];\n@!%p1 ld.shared::cta.u32 %r1, [x+-4]; /* a\nb */ ret;";
        let joined = tokens(text).join(" ");
        assert_eq!(joined, ".local .align 4 .b8 x [ 8 ] ; @ ! %p1 ld.shared::cta.u32 %r1 , [ x + - 4 ] ; ret ;");
    }
}
