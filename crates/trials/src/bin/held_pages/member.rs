//! The program as a member: pages of known content that are folded, and written to a slow file.
//!
//! | command | answer |
//! |---|---|
//! | `fill SEED` | `ok`: every page has a content of its own, the same for the same seed |
//! | `write PAGE` | `ok`: the kernel keeps a request to write the page to the slow file, past the page cache |
//! | `take` | `right` or `wrong`: the bytes that the file was given for it |

use crate::fuse::SlowFile;
use crate::pages::Pages;
use page::PAGE_BYTES;
use std::error::Error;

/// Number of pages.
const PAGES: usize = 512;

fn content(seed: u64) -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    for (n, word) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_mul(n as u64 + 1).to_ne_bytes();
    }
    bytes
}

/// Runs until standard input ends.
pub fn run() -> Result<(), Box<dyn Error>> {
    let pages = Pages::foldable(PAGES)?;
    let (mut slow, mut seed, mut under_way) = (None, 0, 0);
    for line in std::io::stdin().lines() {
        let line = line?;
        let answer = match line.split_once(' ').unwrap_or((&line, "")) {
            ("fill", number) => {
                seed = number.parse()?;
                (0..PAGES).for_each(|page| pages.fill(page, &content(seed + page as u64)));
                "ok"
            }
            ("write", page) => {
                let page: usize = page.parse()?;
                under_way = seed + page as u64;
                slow.insert(SlowFile::mount()?).begin_write(pages.page(page))?;
                "ok"
            }
            ("take", _) => {
                let bytes = slow.as_mut().ok_or("nothing is written")?.take_write()?;
                if bytes == content(under_way) { "right" } else { "wrong" }
            }
            _ => return Err(format!("no command {line:?}").into()),
        };
        println!("{answer}");
    }
    Ok(())
}
