// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which ranks are near each other: under one switch, one root port, one socket.

use crate::error::Rank;

/// A part of the machine: one rank, or parts whose members are nearer to each other than to the rest.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Tree {
    /// One rank.
    Leaf(Rank),
    /// Parts side by side.
    Part(Vec<Tree>),
}

impl Tree {
    /// All ranks equally near.
    ///
    /// ```
    /// use pcieipc::plan::Tree;
    /// assert_eq!(Tree::flat(3).to_string(), "(0 1 2)");
    /// ```
    pub fn flat(ranks: usize) -> Self {
        Self::Part((0..ranks).map(Self::Leaf).collect())
    }

    /// Parts of these sizes, ranks numbered through.
    ///
    /// ```
    /// # use pcieipc::plan::Tree;
    /// assert_eq!(Tree::groups(&[2, 1]).to_string(), "((0 1) 2)");
    /// ```
    pub fn groups(sizes: &[usize]) -> Self {
        let mut next = 0;
        let mut parts = Vec::new();
        for &size in sizes {
            let members = (next..next + size).map(Self::Leaf);
            parts.push(if size == 1 { Self::Leaf(next) } else { Self::Part(members.collect()) });
            next += size;
        }
        Self::Part(parts)
    }

    /// All ranks below, in order.
    ///
    /// ```
    /// use pcieipc::plan::Tree;
    /// assert_eq!("((0 2) (1 3))".parse::<Tree>()?.ranks(), [0, 2, 1, 3]);
    /// # Ok::<(), String>(())
    /// ```
    pub fn ranks(&self) -> Vec<Rank> {
        match self {
            Self::Leaf(rank) => vec![*rank],
            Self::Part(parts) => parts.iter().flat_map(Self::ranks).collect(),
        }
    }

    /// Whether it holds each of `0..ranks` exactly once and no part is empty.
    ///
    /// ```
    /// use pcieipc::plan::Tree;
    /// assert!(Tree::groups(&[2, 2]).covers(4) && !Tree::groups(&[2, 2]).covers(3));
    /// ```
    pub fn covers(&self, ranks: usize) -> bool {
        fn full(tree: &Tree) -> bool {
            match tree {
                Tree::Leaf(_) => true,
                Tree::Part(parts) => !parts.is_empty() && parts.iter().all(full),
            }
        }
        let mut all = self.ranks();
        all.sort_unstable();
        full(self) && all.into_iter().eq(0..ranks)
    }

    /// The tree of some of its ranks: `members[i]` becomes rank `i`, the others and parts without any are left out.
    ///
    /// ```
    /// # use pcieipc::plan::Tree;
    /// assert_eq!(Tree::groups(&[2, 2]).among(&[0, 2, 3]).to_string(), "(0 (1 2))");
    /// ```
    pub fn among(&self, members: &[Rank]) -> Self {
        fn kept(tree: &Tree, members: &[Rank]) -> Option<Tree> {
            match tree {
                Tree::Leaf(rank) => members.iter().position(|m| m == rank).map(Tree::Leaf),
                Tree::Part(parts) => {
                    let mut below: Vec<Tree> = parts.iter().filter_map(|p| kept(p, members)).collect();
                    if below.len() > 1 { Some(Tree::Part(below)) } else { below.pop() }
                }
            }
        }
        match kept(self, members) {
            Some(part @ Self::Part(_)) => part,
            leaf => Self::Part(leaf.into_iter().collect()),
        }
    }

    /// Levels of parts above the deepest rank.
    ///
    /// ```
    /// use pcieipc::plan::Tree;
    /// assert_eq!((Tree::flat(4).height(), Tree::groups(&[2, 2]).height()), (1, 2));
    /// ```
    pub fn height(&self) -> usize {
        match self {
            Self::Leaf(_) => 0,
            Self::Part(parts) => 1 + parts.iter().map(Self::height).max().unwrap_or(0),
        }
    }
}

impl std::fmt::Display for Tree {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Leaf(rank) => write!(f, "{rank}"),
            Self::Part(parts) => {
                f.write_str("(")?;
                for (i, part) in parts.iter().enumerate() {
                    write!(f, "{}{part}", if i == 0 { "" } else { " " })?;
                }
                f.write_str(")")
            }
        }
    }
}

impl std::str::FromStr for Tree {
    type Err = String;

    /// Reads what [`Tree`] prints: ranks and parentheses, such as `((0 1) (2 3))`.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut open: Vec<Vec<Self>> = vec![vec![]];
        let spaced = text.replace('(', " ( ").replace(')', " ) ");
        for word in spaced.split_whitespace() {
            let part = match word {
                "(" => {
                    open.push(vec![]);
                    continue;
                }
                ")" if open.len() > 1 => open.pop().map(Self::Part),
                ")" => return Err(format!("{text}: one ) too many")),
                rank => Some(Self::Leaf(rank.parse().map_err(|_| format!("{rank} is not a rank"))?)),
            };
            if let (Some(part), Some(last)) = (part, open.last_mut()) {
                last.push(part);
            }
        }
        match (open.len(), open.pop().unwrap_or_default()) {
            (1, mut parts) if parts.len() == 1 => Ok(parts.remove(0)),
            (1, parts) if !parts.is_empty() => Ok(Self::Part(parts)),
            (1, _) => Err("an empty tree".into()),
            _ => Err(format!("{text}: a ) is missing")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_read_what_they_print_and_refuse_the_rest() {
        for text in ["(0 1 2)", "((0 1) (2 3))", "(0 (1 (2 3)))", "0"] {
            assert_eq!(text.parse::<Tree>().unwrap().to_string(), text);
        }
        for text in ["", "(", ")", "(0", "0)", "(x)"] {
            assert!(text.parse::<Tree>().is_err(), "{text}");
        }
        assert!(Tree::groups(&[2, 3, 1]).covers(6) && !Tree::groups(&[2, 3]).covers(6));
        assert!(!"(0 0)".parse::<Tree>().unwrap().covers(2) && !"(0 ())".parse::<Tree>().unwrap().covers(1));
        assert_eq!("(0 (1 (2 3)))".parse::<Tree>().unwrap().height(), 3);
    }
}
