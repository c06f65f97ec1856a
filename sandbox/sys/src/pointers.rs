//! The arguments and the environment of a program, for exec.

use core::ffi::CStr;
use core::marker::PhantomData;

use crate::Errno;
use crate::memory::Mapping;

/// The arguments and the environment of a program for exec: two null-terminated lists of pointers to C strings, without a
/// heap, and limited only by the kernel.
pub struct Pointers<'a> {
    memory: Words,
    arguments: List,
    environment: List,
    strings: PhantomData<&'a CStr>,
}

/// The memory of [`Pointers`], which starts as zeros: usually a part of the stack, whose pages exist already.
#[expect(clippy::large_enum_variant, reason = "there is no heap, and one value per process")]
enum Words {
    Few(FewWords),
    Many(Mapping),
}

/// Space for 64 pointers.
#[repr(align(8))]
struct FewWords([u8; 64 * size_of::<usize>()]);

impl Words {
    fn with_capacity(bytes: usize) -> Result<Self, Errno> {
        if bytes <= size_of::<FewWords>() {
            return Ok(Self::Few(FewWords([0; _])));
        }
        Mapping::anonymous(bytes).map(Self::Many)
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Few(words) => &words.0,
            Self::Many(words) => words,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Few(words) => &mut words.0,
            Self::Many(words) => words,
        }
    }
}

/// A part of the memory of [`Pointers`], as indices of words.
struct List {
    start: usize,
    used: usize,
    /// Index of the last word, which stays zero: the null that ends the list.
    end: usize,
}

impl<'a> Pointers<'a> {
    /// Allocates space for this number of arguments and of variables.
    ///
    /// # Errors
    /// ENOMEM if there is no memory.
    pub fn with_capacity(arguments: usize, variables: usize) -> Result<Self, Errno> {
        let words = arguments.checked_add(variables).and_then(|count| count.checked_add(2));
        let bytes = words.and_then(|words| words.checked_mul(size_of::<usize>())).ok_or(Errno::ENOMEM)?;
        Ok(Self {
            memory: Words::with_capacity(bytes)?,
            arguments: List { start: 0, used: 0, end: arguments },
            environment: List { start: arguments + 1, used: 0, end: arguments + 1 + variables },
            strings: PhantomData,
        })
    }

    /// Appends an argument.
    ///
    /// # Errors
    /// EINVAL if there is no space for another one.
    pub fn push_argument(&mut self, text: &'a CStr) -> Result<(), Errno> {
        self.arguments.push(&mut self.memory, text)
    }

    /// Appends a variable of the environment, `NAME=value`.
    ///
    /// # Errors
    /// EINVAL if there is no space for another one.
    pub fn push_variable(&mut self, text: &'a CStr) -> Result<(), Errno> {
        self.environment.push(&mut self.memory, text)
    }

    /// Addresses of both lists.
    pub(crate) fn addresses(&self) -> [usize; 2] {
        let start = self.memory.bytes().as_ptr() as usize;
        [&self.arguments, &self.environment].map(|list| start + list.start * size_of::<usize>())
    }
}

impl List {
    fn push(&mut self, memory: &mut Words, text: &CStr) -> Result<(), Errno> {
        const WIDTH: usize = size_of::<usize>();
        let word = self.start + self.used;
        if word >= self.end {
            return Err(Errno::EINVAL);
        }
        memory.bytes_mut()[word * WIDTH..][..WIDTH].copy_from_slice(&(text.as_ptr() as usize).to_ne_bytes());
        self.used += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists_of(count: usize) {
        let mut pointers = Pointers::with_capacity(count, 3).unwrap();
        for _ in 0..count {
            pointers.push_argument(c"x").unwrap();
        }
        for _ in 0..3 {
            pointers.push_variable(c"y").unwrap();
        }
        assert_eq!(pointers.push_argument(c"x"), Err(Errno::EINVAL));
        assert_eq!(pointers.push_variable(c"y"), Err(Errno::EINVAL));
        let [arguments, environment] = pointers.addresses();
        let (words, _) = pointers.memory.bytes().as_chunks();
        let words: Vec<_> = words.iter().map(|word| usize::from_ne_bytes(*word)).collect();
        let list = |address: usize| {
            let start = (address - pointers.memory.bytes().as_ptr() as usize) / size_of::<usize>();
            words[start..].iter().take_while(|word| **word != 0).copied().collect::<Vec<_>>()
        };
        assert_eq!(list(arguments), vec![c"x".as_ptr() as usize; count]);
        assert_eq!(list(environment), [c"y".as_ptr() as usize; 3]);
    }

    #[test]
    fn both_lists_end_with_a_null() {
        // 64 words fit into the stack's part.
        for count in [1, 58, 59, 60, 600] {
            lists_of(count);
        }
        let none = Pointers::with_capacity(0, 0).unwrap();
        assert_eq!(none.memory.bytes()[..16], [0; 16]);
    }
}
