//! The mappings in the kernel's own address ranges outside the direct map: vmalloc, modules, and stacks of threads.
//!
//! Stacks are found through the list of all threads. It begins with the kernel's first thread (`init_task`), which is a
//! variable in the kernel's data and is found by its name and its pid. The offsets come from BTF. A list is followed
//! for no more threads than fit into the guest's memory, so that following a circular list ends.

use crate::kernel::{Kernel, search};
use crate::paging::Leaf;
use page::{GuestPageKind, GuestPhys, PAGE_BYTES};

/// Name of the kernel's first thread, the idle thread of the first processor.
const FIRST_NAME: &[u8] = b"swapper/0\0";
/// Most threads of a guest that are looked at: 2^20, and no more than the guest has frames.
const MOST_THREADS: u64 = 1 << 20;
/// Largest stack that is accepted, in bytes: kernels have 16 KiB, or 32 with sanitisers.
const MOST_STACK_BYTES: u64 = 64 << 10;
/// Address of the image, behind which come the modules; vmalloc's range ends before. See the kernel's
/// `Documentation/arch/x86/x86_64/mm.rst`.
const IMAGE: u64 = 0xffff_ffff_8000_0000;
/// First address behind the image and the modules, where fixed mappings begin.
const MODULES_END: u64 = 0xffff_ffff_ff00_0000;

/// Offsets of members of a thread and its process, in bytes, and the size of a stack.
struct TaskLayout {
    tasks: u64,
    pid: u64,
    name: u64,
    stack: u64,
    signal: u64,
    threads: u64,
    thread: u64,
    stack_bytes: u64,
}

impl Kernel<'_> {
    /// All mappings in the ranges for vmalloc and for modules.
    pub(crate) fn vmalloc(&self) -> Vec<Leaf> {
        let mut leaves = Vec::new();
        let frames = self.memory.ranges().iter().map(|range| range.frames).sum::<u64>();
        // A table of the last level maps 512 pages, but it is not full if allocations are small.
        let most_tables = 4096 + frames / 64;
        let mut keep = |leaf: Leaf| {
            leaves.push(leaf);
            (leaves.len() as u64) < frames.saturating_mul(2)
        };
        if let Some((first, last)) = self.vmalloc_range() {
            self.tables.walk(first, last, most_tables, &mut keep);
        }
        let image_end = self.image.last().map_or(IMAGE, |part| part.address + part.bytes);
        self.tables.walk(image_end, MODULES_END, most_tables, &mut keep);
        leaves
    }

    /// First and last address of vmalloc's range, which is between the direct map and the frames' descriptions.
    fn vmalloc_range(&self) -> Option<(u64, u64)> {
        let (pages, _) = self.pages_of(self.memory.ranges().first()?.start.frame())?;
        // The array of descriptions begins at a multiple of 1 GiB, with nothing else in its first GiB.
        let end = pages & !((1 << 30) - 1);
        let first = match self.note.number("VMALLOC_START") {
            Some(start) => start as u64,
            None => self.direct_map_end()?,
        };
        (first < end && first >= self.tables.kernel_half()).then(|| (first, end - 1))
    }

    /// The first address behind the direct map, which maps all memory in ascending order.
    fn direct_map_end(&self) -> Option<u64> {
        let mut offset = None;
        let mut end = None;
        self.tables.walk(0, IMAGE - 1, 1 << 16, &mut |leaf| {
            let this = leaf.address.wrapping_sub(leaf.phys.0);
            if *offset.get_or_insert(this) != this {
                return false;
            }
            end = leaf.address.checked_add(leaf.bytes);
            true
        });
        end
    }

    /// Frames of the stacks of all threads.
    pub(crate) fn stacks(&self) -> Vec<GuestPhys> {
        let mut frames = Vec::new();
        let Some(layout) = self.task_layout() else { return frames };
        let Some(first) = self.first_task(&layout) else { return frames };
        let memory: u64 = self.memory.ranges().iter().map(|range| range.frames).sum();
        let mut left = MOST_THREADS.min(memory);
        let mut add = |task: u64| {
            let Some(stack) = self.tables.u64(task.wrapping_add(layout.stack)) else { return };
            let pages = (0..layout.stack_bytes).step_by(PAGE_BYTES);
            frames.extend(pages.filter_map(|at| self.tables.translate(stack.wrapping_add(at))));
        };
        self.follow_list(first.wrapping_add(layout.tasks), &mut left, &mut |node, left| {
            let process = node.wrapping_sub(layout.tasks);
            let signal = self.tables.u64(process.wrapping_add(layout.signal)).unwrap_or(0);
            let threads = signal.wrapping_add(layout.threads);
            let mut any = false;
            self.follow_list(threads, left, &mut |node, _| {
                // The list's head is a node, too, but no thread.
                if node != threads {
                    any = true;
                    add(node.wrapping_sub(layout.thread));
                }
            });
            if !any {
                add(process);
            }
        });
        frames
    }

    fn task_layout(&self) -> Option<TaskLayout> {
        let btf = self.btf.as_ref()?;
        let at = |name: &str| btf.offset(name);
        Some(TaskLayout {
            tasks: at("task_struct.tasks")?,
            pid: at("task_struct.pid")?,
            name: at("task_struct.comm")?,
            stack: at("task_struct.stack")?,
            signal: at("task_struct.signal")?,
            threads: at("signal_struct.thread_head")?,
            thread: at("task_struct.thread_node")?,
            stack_bytes: btf.size("thread_union").filter(|n| *n <= MOST_STACK_BYTES).unwrap_or(16 << 10),
        })
    }

    fn first_task(&self, layout: &TaskLayout) -> Option<u64> {
        let overlap = FIRST_NAME.len() as u64;
        search(self.memory, &self.image, GuestPageKind::KernelData, overlap, |address, piece| {
            let names = piece.windows(FIRST_NAME.len()).enumerate().filter(|(_, name)| *name == FIRST_NAME);
            names.map(|(at, _)| address.wrapping_add(at as u64).wrapping_sub(layout.name)).find(|task| {
                let node = task.wrapping_add(layout.tasks);
                let back = |next: u64| self.tables.u64(next.wrapping_add(8));
                self.tables.u32(task.wrapping_add(layout.pid)) == Some(0)
                    && self.tables.u64(node).and_then(back) == Some(node)
            })
        })
    }

    /// Calls `each` with the nodes of a circular list, beginning with `first`, and subtracts 1 from `left` for each.
    /// Ends when `first` comes again, or `left` is 0.
    fn follow_list(&self, first: u64, left: &mut u64, each: &mut dyn FnMut(u64, &mut u64)) {
        let mut node = first;
        while *left > 0 {
            *left -= 1;
            each(node, left);
            match self.tables.u64(node) {
                Some(next) if next != first && next >= self.tables.kernel_half() => node = next,
                _ => return,
            }
        }
    }

    /// The number of the youngest generation of a control group's frames on node 0. `None` if it cannot be found. For
    /// frames charged to no control group, the root group's number is returned.
    pub(crate) fn youngest_generation(&self, memcg: u64) -> Option<u64> {
        let btf = self.btf.as_ref()?;
        let newest = btf.offset("lruvec.lrugen.max_seq")?;
        // The low bits of `memcg_data` say what kind of structure it points to.
        let owner = memcg & !0xf;
        let lruvec = if owner == 0 {
            let node = self.tables.u64(self.note.symbol("node_data")?)?;
            node.wrapping_add(btf.offset("pglist_data.__lruvec")?)
        } else {
            let through = || self.tables.u64(owner.wrapping_add(btf.offset("obj_cgroup.memcg")?));
            let node = self.node_of_group(owner).or_else(|| self.node_of_group(through()?))?;
            node.wrapping_add(btf.offset("mem_cgroup_per_node.lruvec")?)
        };
        self.tables.u64(lruvec.wrapping_add(newest))
    }

    /// The structure that a control group has for node 0. It points back to the group, which is checked. Since Linux
    /// 7.0 a frame points to an `obj_cgroup` in place of the group; that fails the check.
    fn node_of_group(&self, memcg: u64) -> Option<u64> {
        let btf = self.btf.as_ref()?;
        let node = self.tables.u64(memcg.wrapping_add(btf.offset("mem_cgroup.nodeinfo")?))?;
        let back = self.tables.u64(node.wrapping_add(btf.offset("mem_cgroup_per_node.memcg")?))?;
        (back == memcg).then_some(node)
    }
}
