//! Reading and writing the fields of a frame, bounded.

/// Why a frame is not valid. No honest peer sends such a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The frame ends within a field.
    #[error("the frame ends within a field")]
    Truncated,
    /// Bytes are left after the frame's last field.
    #[error("the frame goes on after its last field")]
    TooLong,
    /// No message has this number.
    #[error("no message has the number {0}")]
    UnknownKind(u16),
    /// A field has a value that it cannot have.
    #[error("{0} is out of range")]
    OutOfRange(&'static str),
}

pub(crate) type Result<T> = std::result::Result<T, Malformed>;

/// Takes fields from the front of a frame.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) const fn new(frame: &'a [u8]) -> Self {
        Self(frame)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed::Truncated)?;
        self.0 = rest;
        Ok(*head)
    }

    pub(crate) fn u8(&mut self) -> Result<u8> {
        self.take::<1>().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Result<u16> {
        self.take().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        self.take().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        self.take().map(u64::from_le_bytes)
    }

    pub(crate) fn flag(&mut self, name: &'static str) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed::OutOfRange(name)),
        }
    }

    /// A list of at most `most` things. Each takes at least a byte, so a short frame that promises a long list is
    /// refused before any memory is allocated.
    pub(crate) fn list<T>(
        &mut self,
        name: &'static str,
        most: usize,
        one: impl Fn(&mut Self) -> Result<T>,
    ) -> Result<Vec<T>> {
        let length = usize::try_from(self.u32()?).unwrap_or(usize::MAX);
        if length > most {
            return Err(Malformed::OutOfRange(name));
        }
        if length > self.0.len() {
            return Err(Malformed::Truncated);
        }
        (0..length).map(|_| one(self)).collect()
    }

    pub(crate) fn text(&mut self, name: &'static str, most: usize) -> Result<String> {
        let bytes = self.list(name, most, Self::u8)?;
        String::from_utf8(bytes).map_err(|_| Malformed::OutOfRange(name))
    }

    pub(crate) const fn end(&self) -> Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed::TooLong) }
    }
}

/// Appends fields to a frame.
pub(crate) struct Writer<'a>(pub(crate) &'a mut Vec<u8>);

impl Writer<'_> {
    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn list<T>(&mut self, things: &[T], mut one: impl FnMut(&mut Self, &T)) {
        self.u32(u32::try_from(things.len()).unwrap_or(u32::MAX));
        for thing in things {
            one(self, thing);
        }
    }

    /// Writes at most `most` bytes of a text, cut between characters.
    pub(crate) fn text(&mut self, text: &str, most: usize) {
        self.list(&text.as_bytes()[..text.floor_char_boundary(most)], |w, b| w.u8(*b));
    }
}
