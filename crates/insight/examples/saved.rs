//! Prints the kinds of the frames of a guest whose memory was saved to a file. A tool for development.

fn main() {
    let path = std::env::args().nth(1).expect("a file");
    let saved = insight::Saved::new(std::fs::read(path).expect("read it"));
    let begin = std::time::Instant::now();
    let kernel = insight::Kernel::find(&saved).unwrap_or_else(|e| panic!("{e}"));
    println!(
        "{} {:#x?} {} types {} after {:?}",
        kernel.release(),
        kernel.kaslr_offset(),
        kernel.paging_levels(),
        kernel.has_types(),
        begin.elapsed()
    );
    let frames = kernel.classify();
    println!("{:?}", begin.elapsed());
    for (kind, n) in page::GuestPageKind::ALL.iter().zip(insight::count(&frames.uses)) {
        println!("{:14} {n}", kind.name());
    }
    let mut pages = vec![0; frames.files.len() + 1];
    frames.file_of.iter().for_each(|n| pages[*n as usize] += 1);
    let mut order: Vec<_> = (1..pages.len()).collect();
    order.sort_by_key(|n| std::cmp::Reverse(pages[*n]));
    for n in order.into_iter().take(20) {
        println!("{} {:?}", pages[n], kernel.file(frames.files[n - 1]));
    }
    println!("{:?}", begin.elapsed());
    if let Some(out) = std::env::args().nth(2) {
        let bytes: Vec<u8> = frames.uses.iter().map(|u| u.kind() as u8 | (u.lru() as u8) << 4).collect();
        std::fs::write(out, bytes).expect("write");
    }
}
