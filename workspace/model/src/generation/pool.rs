//! A pool of blocks, which store the keys and values of some tokens each, and the sequences that use the blocks. The
//! pool remembers blocks of prompts by their tokens and the tokens before them, so that later prompts with the same
//! beginning share the blocks. A new allocation reuses the block that was released first, and forgets its content.

use std::collections::{BTreeMap, HashMap};

/// The content before the first block of a prompt.
const ROOT: u64 = 0;

/// The content of a block: the number of the content before it, and its tokens.
type Key = (u64, Box<[u32]>);

#[derive(Debug, Clone, Default)]
struct Block {
    users: u32,
    /// Time at which the last user released the block, if it has no user.
    left: u64,
    /// The block's content, if the pool remembers it.
    content: Option<Key>,
}

/// The blocks with their users and contents.
#[derive(Debug)]
pub(super) struct BlockPool {
    block_length: usize,
    blocks: Vec<Block>,
    /// Blocks without a user, by the time of their release.
    free: BTreeMap<u64, u32>,
    /// The block of a content, and the content's number.
    contents: HashMap<Key, (u32, u64)>,
    clock: u64,
    next_content: u64,
}

impl BlockPool {
    pub fn new(blocks: usize, block_length: usize) -> Self {
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let block = |left| Block { left, ..Block::default() };
        BlockPool {
            block_length,
            blocks: (0..u64::from(blocks)).map(block).collect(),
            free: (0..blocks).map(|block| (u64::from(block), block)).collect(),
            contents: HashMap::new(),
            clock: u64::from(blocks),
            next_content: ROOT + 1,
        }
    }

    /// Returns the number of blocks that no sequence uses.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Returns an unused block and forgets its content; `None` if all blocks are in use.
    pub fn allocate(&mut self) -> Option<u32> {
        let (_, block) = self.free.pop_first()?;
        let entry = &mut self.blocks[block as usize];
        entry.users = 1;
        if let Some(content) = entry.content.take() {
            self.contents.remove(&content);
        }
        Some(block)
    }

    /// Removes one user of a block.
    pub fn release(&mut self, block: u32) {
        let entry = &mut self.blocks[block as usize];
        entry.users -= 1;
        if entry.users == 0 {
            (entry.left, self.clock) = (self.clock, self.clock + 1);
            self.free.insert(entry.left, block);
        }
    }

    /// Adds a user to the remembered blocks at the beginning of `tokens`. Returns these blocks and the content after
    /// them.
    pub fn share(&mut self, tokens: &[u32]) -> (Vec<u32>, u64) {
        let (mut shared, mut content) = (Vec::new(), ROOT);
        for tokens in tokens.chunks_exact(self.block_length) {
            let key = (content, Box::from(tokens));
            let Some(&(block, number)) = self.contents.get(&key) else { break };
            let entry = &mut self.blocks[block as usize];
            if entry.users == 0 {
                self.free.remove(&entry.left);
            }
            entry.users += 1;
            shared.push(block);
            content = number;
        }
        (shared, content)
    }

    /// Remembers a block's tokens after the content `before`, and returns the content after them. If another block
    /// already has this content, the block is not remembered.
    pub fn remember(&mut self, block: u32, before: u64, tokens: &[u32]) -> u64 {
        let key = (before, Box::from(tokens));
        if let Some(&(_, number)) = self.contents.get(&key) {
            return number;
        }
        let number = self.next_content;
        self.next_content += 1;
        self.blocks[block as usize].content = Some(key.clone());
        self.contents.insert(key, (block, number));
        number
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_prompt_with_the_same_beginning_shares_its_blocks() {
        let mut pool = BlockPool::new(4, 2);
        let [first, second] = [pool.allocate().unwrap(), pool.allocate().unwrap()];
        let content = pool.remember(first, ROOT, &[1, 2]);
        assert_eq!(pool.remember(second, content, &[3, 4]), content + 1);
        assert_eq!(pool.share(&[1, 2, 3, 4, 5]), (vec![first, second], content + 1));
        // Whole blocks are shared, and only after the same tokens.
        assert_eq!(pool.share(&[1, 2, 3]), (vec![first], content));
        assert_eq!(pool.share(&[3, 4, 5]).0, Vec::<u32>::new());
        assert_eq!(pool.free(), 2);
        for block in [first, first, first, second, second] {
            pool.release(block);
        }
        assert_eq!(pool.free(), 4);
        // The same content in another block is not remembered twice.
        let third = pool.allocate().unwrap();
        assert!(third != first && third != second, "unused blocks come first");
        assert_eq!(pool.remember(third, ROOT, &[1, 2]), content);
        assert_eq!(pool.share(&[1, 2, 9]).0, [first]);
    }

    #[test]
    fn the_block_that_was_left_first_is_forgotten_first() {
        let mut pool = BlockPool::new(2, 1);
        let [first, second] = [pool.allocate().unwrap(), pool.allocate().unwrap()];
        assert_eq!(pool.allocate(), None);
        pool.remember(first, ROOT, &[1]);
        pool.remember(second, ROOT, &[2]);
        pool.release(second);
        pool.release(first);
        assert_eq!(pool.allocate(), Some(second));
        assert_eq!((pool.share(&[2, 0]).0.len(), pool.share(&[1, 0]).0.len()), (0, 1));
    }

    proptest! {
        /// In any order of shares, allocations and releases, each block is free or has its users. Shared blocks have
        /// the tokens that were remembered.
        #[test]
        fn users_are_counted(steps in prop::collection::vec((0u32..3, 0u32..3, 1usize..6), 1..60)) {
            const BLOCKS: usize = 8;
            let mut pool = BlockPool::new(BLOCKS, 2);
            let mut tokens_of: Vec<Vec<u32>> = vec![Vec::new(); BLOCKS];
            let mut live: Vec<Vec<u32>> = Vec::new();
            for (action, seed, length) in steps {
                if action == 0 && !live.is_empty() {
                    let sequence = live.remove(seed as usize % live.len());
                    sequence.into_iter().for_each(|block| pool.release(block));
                } else {
                    let prompt: Vec<u32> = (0..2 * length as u32 + 1).map(|i| i * seed % 3).collect();
                    let (mut blocks, mut content) = pool.share(&prompt);
                    for (at, &block) in blocks.iter().enumerate() {
                        prop_assert_eq!(&tokens_of[block as usize][..], &prompt[..2 * at + 2]);
                    }
                    for at in blocks.len()..length {
                        let Some(block) = pool.allocate() else { break };
                        tokens_of[block as usize] = prompt[..2 * at + 2].to_vec();
                        content = pool.remember(block, content, &prompt[2 * at..2 * at + 2]);
                        blocks.push(block);
                    }
                    live.push(blocks);
                }
                let mut used: Vec<u32> = live.concat();
                used.sort_unstable();
                used.dedup();
                prop_assert_eq!(pool.free(), BLOCKS - used.len());
            }
        }
    }
}
