//! Requests in an order in which those that begin alike share their beginning: it is computed once, and they wait for it.

use rayon::prelude::*;

use super::Request;
use crate::Error;

/// The requests that are not computed yet.
pub(super) struct Queue<'a> {
    requests: &'a [Request],
    block_length: usize,
    /// By their inputs, so that those that begin alike are neighbours.
    order: Vec<usize>,
    /// Tokens with which the input of each of `order` begins as that before it does.
    common: Vec<usize>,
    is_taken: Vec<bool>,
    /// The first of `order` that is not taken.
    first: usize,
}

impl<'a> Queue<'a> {
    /// Of requests that share whole blocks of `block_length` tokens.
    pub fn new(requests: &'a [Request], block_length: usize) -> Self {
        let mut order: Vec<usize> = (0..requests.len()).collect();
        let input = |index: usize| requests[index].input();
        order.par_sort_by(|&a, &b| input(a).cmp(input(b)));
        let mut common = vec![0; order.len().min(1)];
        common.extend(order.windows(2).map(|pair| {
            let pairs = input(pair[0]).iter().zip(input(pair[1]));
            pairs.take_while(|(a, b)| a == b).count()
        }));
        let is_taken = vec![false; order.len()];
        Queue { requests, block_length, order, common, is_taken, first: 0 }
    }

    /// Offers requests until `take` refuses one; those that it takes are computed before the next call. Skips a request
    /// that shares more blocks with one of this call than with those of earlier calls.
    pub fn take(
        &mut self,
        mut take: impl FnMut(usize) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        // Tokens in common with the nearest request before it that an earlier call took, and that this one took.
        let (mut earlier, mut now) = (usize::MAX, 0);
        for at in self.first..self.order.len() {
            earlier = earlier.min(self.common[at]);
            now = now.min(self.common[at]);
            if self.is_taken[at] {
                earlier = usize::MAX;
                continue;
            }
            let request = &self.requests[self.order[at]];
            let blocks = |common: usize| common.min(request.unscored()) / self.block_length;
            if blocks(now) > blocks(earlier) {
                continue;
            }
            if !take(self.order[at])? {
                break;
            }
            self.is_taken[at] = true;
            now = usize::MAX;
        }
        while self.is_taken.get(self.first) == Some(&true) {
            self.first += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The requests of each call, of which each takes at most `most`.
    fn calls(requests: &[Request], most: usize) -> Vec<Vec<usize>> {
        let (mut queue, mut calls) = (Queue::new(requests, 2), Vec::<Vec<usize>>::new());
        while calls.iter().flatten().count() < requests.len() {
            let mut call = Vec::new();
            let mut take = |index| {
                let takes = call.len() < most;
                call.extend(takes.then_some(index));
                Ok(takes)
            };
            queue.take(&mut take).unwrap();
            assert!(!call.is_empty());
            calls.push(call);
        }
        assert!(queue.take(|_| panic!("none is left")).is_ok());
        calls
    }

    fn request(tokens: &[u32], continuation: usize) -> Request {
        Request { tokens: tokens.to_vec(), continuation }
    }

    #[test]
    fn requests_wait_for_what_they_share() {
        // Two examples, and after them questions with two choices each.
        let choice = |question, choice| request(&[7, 7, 7, 7, question, 8, 8, choice, 9], 2);
        let requests =
            [choice(2, 1), choice(1, 1), choice(1, 2), choice(2, 2), request(&[5, 6], 1)];
        assert_eq!(calls(&requests, 9), [vec![4, 1], vec![2, 0], vec![3]]);
        assert_eq!(calls(&requests, 1), [[4], [1], [2], [0], [3]]);
    }

    #[test]
    fn requests_that_share_no_whole_block_do_not_wait() {
        // One common token, and common tokens whose logits are wanted.
        let requests =
            [request(&[1, 2, 3, 4], 1), request(&[1, 3, 4, 5], 1), request(&[1, 3, 4, 6, 7], 4)];
        assert_eq!(calls(&requests, 9), [[0, 1, 2]]);
        assert!(calls(&[], 9).is_empty());
    }
}
