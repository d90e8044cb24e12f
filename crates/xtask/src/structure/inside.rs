//! Counts inside of a room, tests aside: files that import each other in a circle, numbers in constants, `target_env`,
//! and large structs. ARCHITECTURE.md has a bound for each, in its section "Budgets".

use anyhow::Result;
use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};
use serde::Serialize;

use crate::rust::is_attribute;

/// Most fields of a struct that does not count as large.
const MOST_FIELDS: usize = 12;

/// Counts of one room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Files of the largest circle of imports.
    pub circle: usize,
    /// Numbers in the values of constants and static items.
    pub numbers: usize,
    /// Places that tell C libraries apart (`target_env`).
    pub c_libraries: usize,
    /// Structs of more than [`MOST_FIELDS`] fields.
    pub large_structs: usize,
}

impl Counts {
    /// Adds what is in one file, of which [`without_tests`] has made these tokens.
    pub fn add(&mut self, tokens: &[TokenTree]) {
        for (at, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Ident(word) if (word == "const" || word == "static") && begins_item(&tokens[..at]) => {
                    self.numbers += value(&tokens[at + 1..]).iter().map(numbers).sum::<usize>();
                }
                TokenTree::Ident(word) if word == "struct" => {
                    self.large_structs += usize::from(fields(&tokens[at + 1..]) > MOST_FIELDS);
                }
                TokenTree::Ident(word) if word == "target_env" => self.c_libraries += 1,
                TokenTree::Group(group) => self.add(&group.stream().into_iter().collect::<Vec<_>>()),
                _ => {}
            }
        }
    }
}

/// The tokens of a file without those items that are `#[cfg(test)]`.
pub fn without_tests(tokens: TokenStream) -> TokenStream {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let (mut kept, mut at) = (Vec::new(), 0);
    while at < tokens.len() {
        if is_test_attribute(&tokens, at) {
            // The `#` before this attribute was kept: it goes, too.
            kept.pop();
            at = end_of_item(&tokens, at + 1);
            continue;
        }
        kept.push(match &tokens[at] {
            TokenTree::Group(group) => TokenTree::Group(Group::new(group.delimiter(), without_tests(group.stream()))),
            other => other.clone(),
        });
        at += 1;
    }
    kept.into_iter().collect()
}

/// The names of modules that are `#[cfg(test)] mod name;`.
pub fn test_modules(tokens: &TokenStream) -> Vec<String> {
    let tokens: Vec<TokenTree> = tokens.clone().into_iter().collect();
    let tests = (0..tokens.len()).filter(|at| is_test_attribute(&tokens, *at));
    let name = |at: usize| {
        let item = &tokens[at + 1..end_of_item(&tokens, at + 1)];
        let module = item.iter().position(|token| matches!(token, TokenTree::Ident(word) if word == "mod"))?;
        item.get(module + 1).map(ToString::to_string)
    };
    tests.filter_map(name).collect()
}

/// Whether this token is the `[cfg(test)]` of an attribute.
fn is_test_attribute(tokens: &[TokenTree], at: usize) -> bool {
    let text = |token: &TokenTree| token.to_string().split_whitespace().collect::<String>();
    is_attribute(tokens, at) && text(&tokens[at]) == "[cfg(test)]"
}

/// The index behind the item that begins at this one: behind its `;`, or its body.
fn end_of_item(tokens: &[TokenTree], first: usize) -> usize {
    let mut is_use = false;
    for (at, token) in tokens.iter().enumerate().skip(first) {
        match token {
            TokenTree::Ident(word) if word == "use" => is_use = true,
            TokenTree::Punct(punct) if punct.as_char() == ';' => return at + 1,
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace && !is_use => return at + 1,
            _ => {}
        }
    }
    tokens.len()
}

/// Whether `const` or `static` behind these tokens begins an item: not so in `'static`, `*const` and `&raw const`.
fn begins_item(before: &[TokenTree]) -> bool {
    match before.last() {
        Some(TokenTree::Punct(punct)) => !matches!(punct.as_char(), '\'' | '*'),
        Some(TokenTree::Ident(word)) => word != "raw",
        _ => true,
    }
}

/// The tokens between `=` and `;` of a constant whose name comes first; empty if no constant comes, as behind `const
/// fn`.
fn value(tokens: &[TokenTree]) -> &[TokenTree] {
    let is = |token: &TokenTree, sign| matches!(token, TokenTree::Punct(punct) if punct.as_char() == sign);
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Ident(word) if at == 0 && (word == "fn" || word == "unsafe" || word == "extern") => break,
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => break,
            _ if is(token, ';') => break,
            _ if is(token, '<') => depth += 1,
            // The parameter list of a type or function ends here: this was a constant parameter.
            _ if is(token, '>') && depth == 0 => break,
            _ if is(token, '>') => depth -= 1,
            _ if is(token, '=') && depth == 0 => {
                let end = tokens[at..].iter().position(|token| is(token, ';')).map_or(tokens.len(), |end| at + end);
                return &tokens[at + 1..end];
            }
            _ => {}
        }
    }
    &[]
}

/// The numbers in a token.
fn numbers(token: &TokenTree) -> usize {
    match token {
        TokenTree::Literal(literal) => usize::from(literal.to_string().starts_with(|sign: char| sign.is_ascii_digit())),
        TokenTree::Group(group) => group.stream().into_iter().map(|token| numbers(&token)).sum(),
        _ => 0,
    }
}

/// The number of named fields of a struct whose name comes first.
fn fields(tokens: &[TokenTree]) -> usize {
    let body = tokens.iter().find_map(|token| match token {
        TokenTree::Punct(punct) if punct.as_char() == ';' => Some(None),
        TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => Some(Some(group)),
        _ => None,
    });
    let Some(Some(body)) = body else { return 0 };
    let tokens: Vec<TokenTree> = body.stream().into_iter().collect();
    let is_colon = |at: usize| matches!(tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == ':');
    (0..tokens.len())
        .filter(|at| matches!(tokens[*at], TokenTree::Ident(_)) && is_colon(at + 1) && !is_colon(at + 2))
        .count()
}

/// A room and its bounds, as a row of the table says.
#[derive(Debug, PartialEq, Eq)]
pub struct Budget {
    room: String,
    circle: usize,
    numbers: Option<usize>,
    c_libraries: usize,
    large_structs: Option<usize>,
}

/// Reads the table of the section "Budgets". A cell `-` bounds nothing.
///
/// # Errors
/// ARCHITECTURE.md has no such table, or one of its cells is no number.
pub fn budgets(architecture: &str) -> Result<Vec<Budget>> {
    let rows =
        super::allowed::table(architecture, "Budgets", &["crate", "circle", "numbers", "target_env", "structs"])?;
    let bound = |cell: &String| if cell == "-" { Ok(None) } else { cell.parse().map(Some) };
    let budget = |row: Vec<String>| -> Result<Budget> {
        Ok(Budget {
            room: row[0].clone(),
            circle: row[1].parse()?,
            numbers: bound(&row[2])?,
            c_libraries: row[3].parse()?,
            large_structs: bound(&row[4])?,
        })
    };
    rows.into_iter().map(budget).collect()
}

/// Most files of a circle of imports in a room that the table does not name.
const MOST_CIRCLE: usize = 3;

/// Finds counts beyond their bounds, and bounds that can be lowered.
pub fn problems(rooms: &[(String, Counts)], budgets: &[Budget]) -> Vec<String> {
    let mut problems = Vec::new();
    for (room, counts) in rooms {
        let row = budgets.iter().find(|budget| budget.room == *room);
        let circle = row.map_or(MOST_CIRCLE, |row| row.circle);
        // Name, count, bound, and whether the bound may be higher than the count.
        let bounds = [
            ("files in the largest circle of imports", counts.circle.max(MOST_CIRCLE), Some(circle), false),
            ("numbers in constants", counts.numbers, row.and_then(|row| row.numbers), true),
            ("places that name `target_env`", counts.c_libraries, Some(row.map_or(0, |row| row.c_libraries)), false),
            ("structs of more than 12 fields", counts.large_structs, row.and_then(|row| row.large_structs), false),
        ];
        for (what, is, most, may_be_higher) in bounds {
            match most {
                Some(most) if is > most => problems.push(format!("{room}: {is} {what}; it may have {most}")),
                Some(most) if is < most && !may_be_higher => {
                    problems.push(format!("{room}: {is} {what}; lower its bound of {most} in ARCHITECTURE.md"));
                }
                _ => {}
            }
        }
    }
    let is_room = |name: &str| rooms.iter().any(|(room, _)| room == name);
    let unknown = budgets.iter().filter(|budget| !is_room(&budget.room));
    problems.extend(unknown.map(|budget| format!("{}: has a budget in ARCHITECTURE.md, but is no room", budget.room)));
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rust::tokens;

    fn counts(source: &str) -> Counts {
        let mut counts = Counts::default();
        counts.add(&without_tests(tokens(source).unwrap()).into_iter().collect::<Vec<_>>());
        counts
    }

    #[test]
    fn numbers_are_those_of_constants() {
        let source = "const A: (u64, Duration) = (2, Duration::from_secs(60));\nstatic B: [u8; 4] = [0; 4];\n\
                      const fn f<const N: usize>(a: u8) -> u8 { a + 7 }\nimpl S { const C: f64 = 1.5; }\n\
                      pub const P: Params = Params { a: 1, b: Other { c: 2 } };\nconst T: &str = \"3\";\n\
                      fn g(a: *const u8) { let b: &'static str = f(8); }\n\
                      #[cfg(test)]\nmod tests { const D: u8 = 9; }";
        assert_eq!(counts(source).numbers, 2 + 2 + 1 + 2);
    }

    #[test]
    fn structs_count_from_thirteen_fields_on() {
        let of = |fields: usize| {
            let fields: String = (0..fields).map(|n| format!("/// x\n pub f{n}: a::B<C, d::E>, ")).collect();
            counts(&format!("struct S<T> {{ {fields} }} struct U(u8); struct V;")).large_structs
        };
        assert_eq!([12, 13].map(of), [0, 1]);
    }

    #[test]
    fn tests_are_left_out() {
        let source = "#[cfg(test)]\nuse a::{b, c};\n#[cfg(target_env = \"gnu\")]\nmod d;\n#[cfg(test)]\n#[path = \"e.rs\"]\n\
                      mod tests;\n#[cfg(any(test, not(target_env = \"gnu\")))]\nmod f;\nfn g() {}";
        let tokens = tokens(source).unwrap();
        assert_eq!(test_modules(&tokens), ["tests"]);
        let left = without_tests(tokens).to_string();
        assert!(!left.contains("tests") && !left.contains('b'), "{left}");
        assert_eq!(counts(source).c_libraries, 2);
    }

    #[test]
    fn count_beyond_its_budget_is_a_problem_and_so_is_a_budget_that_is_too_high() {
        let text = "# House\n\n## Budgets\n\n| crate | circle | numbers | target_env | structs |\n|---|---|---|---|---|\n\
                    | `a` | 5 | 10 | 1 | 2 |\n| `c` | 4 | - | 0 | - |\n";
        let budgets = budgets(text).unwrap();
        let of = |room: &str, circle, numbers, c_libraries, large_structs| {
            let counts = Counts { circle, numbers, c_libraries, large_structs };
            let all = [
                ("a", Counts { circle: 5, numbers: 10, c_libraries: 1, large_structs: 2 }),
                ("c", Counts { circle: 4, ..Counts::default() }),
            ];
            let others = all.into_iter().filter(|(other, _)| *other != room);
            let rooms: Vec<_> =
                others.chain([(room, counts)]).map(|(room, counts)| (room.to_string(), counts)).collect();
            problems(&rooms, &budgets).len()
        };
        assert_eq!(of("a", 5, 10, 1, 2), 0);
        assert_eq!([of("a", 6, 10, 1, 2), of("a", 5, 11, 1, 2), of("a", 5, 10, 2, 2), of("a", 5, 10, 1, 3)], [1; 4]);
        assert_eq!(
            [of("a", 4, 10, 1, 2), of("a", 5, 9, 1, 2), of("a", 5, 10, 0, 2), of("a", 5, 10, 1, 1)],
            [1, 0, 1, 1]
        );
        assert_eq!([of("c", 4, 99, 0, 99), of("c", 5, 0, 0, 0)], [0, 1]);
        // A room without a row may have circles of three files, and nothing that depends on the C library.
        assert_eq!([of("b", 3, 99, 0, 99), of("b", 4, 0, 0, 0), of("b", 0, 0, 1, 0)], [0, 1, 1]);
    }
}
