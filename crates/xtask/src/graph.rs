//! Cycles of a small directed graph.

use std::collections::{BTreeMap, BTreeSet};

/// Edges by node.
pub type Graph = BTreeMap<String, BTreeSet<String>>;

/// Finds the groups of nodes that all reach each other, sorted. A node alone is such a group if it has an edge to
/// itself.
pub fn cycles(graph: &Graph) -> Vec<Vec<String>> {
    let reach: BTreeMap<&str, BTreeSet<&str>> =
        graph.keys().map(|node| (node.as_str(), reachable(graph, node))).collect();
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    let mut cycles = Vec::new();
    for (&node, reached) in &reach {
        if !reached.contains(node) || seen.contains(node) {
            continue;
        }
        let back = |other: &&str| reach.get(other).is_some_and(|reached| reached.contains(node));
        let group: Vec<&str> = reached.iter().copied().filter(back).collect();
        seen.extend(&group);
        cycles.push(group.into_iter().map(String::from).collect());
    }
    cycles
}

/// Collects the nodes at the end of a path of at least one edge.
pub fn reachable<'a>(graph: &'a Graph, start: &str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open = vec![start];
    while let Some(node) = open.pop() {
        for next in graph.get(node).into_iter().flatten() {
            if reached.insert(next.as_str()) {
                open.push(next);
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(edges: &[(&str, &str)]) -> Graph {
        let mut graph = Graph::new();
        for (from, to) in edges {
            graph.entry(from.to_string()).or_default().insert(to.to_string());
        }
        graph
    }

    #[test]
    fn cycle_is_found_once() {
        let found = cycles(&graph(&[("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"), ("c", "e")]));
        assert_eq!(found, [["a", "b", "c"]]);
    }

    #[test]
    fn two_ways_to_one_node_are_no_cycle() {
        assert!(cycles(&graph(&[("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")])).is_empty());
    }
}
