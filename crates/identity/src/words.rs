//! Lines of words `name=value`.

/// A line that was taken apart.
pub(crate) struct Words<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Words<'a> {
    /// The words behind `first` and the version; `None` for another line.
    pub(crate) fn behind(first: &str, line: &'a str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        if words.next() != Some(first) || words.next() != Some(crate::VERSION) {
            return None;
        }
        words.map(|word| word.split_once('=')).collect::<Option<Vec<_>>>().map(Self)
    }

    /// The value of this name.
    pub(crate) fn get(&self, name: &str) -> Option<&'a str> {
        self.0.iter().find(|(found, _)| *found == name).map(|(_, value)| *value)
    }

    /// All values of this name.
    pub(crate) fn all(&self, name: &'static str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(found, _)| *found == name).map(|(_, value)| *value)
    }
}

/// Bytes as lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes that hexadecimal digits stand for, if there are exactly `N`.
pub(crate) fn bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    if text.len() != 2 * N || !text.is_ascii() {
        return None;
    }
    for (n, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * n..2 * n + 2], 16).ok()?;
    }
    Some(bytes)
}
