//! Problems of a mask.

use super::{Problem, ProblemKind, of, problem};
use crate::TokenFile;
use crate::mask::{ENDING, ones};
use crate::pending::with_ending;

/// Returns the problem of bytes other than 0 and 1, or of another number of trained tokens than recorded.
pub(super) fn faults(file: &TokenFile) -> Option<Problem> {
    let mask = file.mask()?;
    let path = with_ending(file.prefix(), ENDING);
    if let (count, Some(first)) = mask.invalid() {
        let message = format!(
            "{}: the bytes of {} are neither 0 nor 1, first token {first}",
            path.display(),
            of(count, "token", file.num_tokens()),
        );
        return Some(problem(ProblemKind::Mask, count, None, message));
    }
    let recorded = file.info()?.mask.as_ref()?.trained_tokens;
    let found = ones(mask.bytes());
    (found != recorded).then(|| {
        let message = format!(
            "{}: {found} tokens are trained on, but the .json records {recorded}: not the mask of this .json",
            path.display()
        );
        problem(ProblemKind::Mask, found.abs_diff(recorded), None, message)
    })
}

/// Returns the problem of documents without a trained token, except empty documents.
pub(super) fn untrained(file: &TokenFile) -> Option<Problem> {
    let mask = file.mask()?.bytes();
    let (mut count, mut first) = (0, None);
    for document in file.documents().filter(|document| document.tokens > 0) {
        // In bounds: the mask has a byte for each position of the file.
        let bytes = &mask[document.start as usize..(document.start + document.tokens) as usize];
        if bytes.iter().all(|&byte| byte == 0) {
            count += 1;
            first = first.or(Some(document.number));
        }
    }
    let message = format!(
        "{}: {} have no token that is trained on, first document {}",
        with_ending(file.prefix(), ENDING).display(),
        of(count, "document", file.num_documents()),
        first?,
    );
    Some(problem(ProblemKind::Untrained, count, first, message))
}
