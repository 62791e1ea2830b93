//! What to look at in a room. It finds pairs and circles of files, impls away from their types, large types, and
//! long functions.

use super::code::{FunctionInfo, ModulePath, Need, Needs, Room};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// From so many methods on a type is flagged.
const MOST_METHODS: usize = 60;
/// How many names of each direction a pair shows.
const NAMES: usize = 3;

/// Two files that need each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Pair {
    /// The one.
    pub(super) one: PathBuf,
    /// The other.
    pub(super) other: PathBuf,
    /// Whether one is the module that declares the other.
    pub(super) parent_and_child: bool,
    /// What the one needs of the other, as `imports X` or `calls X::y`; the first few.
    pub(super) one_needs: Vec<String>,
    /// What the other needs of the one.
    pub(super) other_needs: Vec<String>,
}

/// An impl that stands outside the module tree of its type.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct StrayImpl {
    /// The type.
    pub(super) name: String,
    /// Where it is defined.
    pub(super) defined: PathBuf,
    /// The impl's file.
    pub(super) file: PathBuf,
    /// And line.
    pub(super) line: usize,
}

/// A type and its size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct TypeSize {
    /// Its name.
    pub(super) name: String,
    /// Where it is defined.
    pub(super) file: PathBuf,
    /// The line.
    pub(super) line: usize,
    /// Methods of its inherent impls.
    pub(super) methods: usize,
    /// Files that these stand in.
    pub(super) method_files: usize,
    /// Fields of a struct; an enum has none.
    pub(super) fields: usize,
    /// Whether it has more methods than a type should.
    pub(super) flagged: bool,
}

/// What was found in one room.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Findings {
    /// The room's folder.
    pub(super) room: PathBuf,
    /// How many files it has.
    pub(super) files: usize,
    /// Pairs of files that import or call each other.
    pub(super) pairs: Vec<Pair>,
    /// Circles of three files or more by imports, largest first.
    pub(super) circles: Vec<Vec<PathBuf>>,
    /// Impls outside their types' module trees.
    pub(super) stray_impls: Vec<StrayImpl>,
    /// All types, those of most methods first.
    #[serde(skip)]
    pub(super) types: Vec<TypeSize>,
    /// All functions.
    #[serde(skip)]
    pub(super) functions: Vec<FunctionInfo>,
}

impl Findings {
    /// Looks at a room.
    pub(super) fn of(folder: PathBuf, room: &Room) -> Self {
        let needs = room.needs();
        let file = |index: usize| room.files.get(index).cloned().unwrap_or_default();
        let mut types: Vec<TypeSize> = room
            .types
            .iter()
            .map(|((_, name), info)| TypeSize {
                name: name.clone(),
                file: file(info.file),
                line: info.line,
                methods: info.methods.len(),
                method_files: info.methods.values().collect::<BTreeSet<_>>().len(),
                fields: info.fields,
                flagged: info.methods.len() > MOST_METHODS,
            })
            .collect();
        types.sort_by_key(|found| std::cmp::Reverse(found.methods));
        Self {
            room: folder,
            files: room.files.len(),
            pairs: pairs(room, &needs),
            circles: circles(room, &needs),
            stray_impls: stray_impls(room),
            types,
            functions: room.functions.clone(),
        }
    }
}

fn pairs(room: &Room, needs: &Needs) -> Vec<Pair> {
    let file = |index: usize| room.files.get(index).cloned().unwrap_or_default();
    let module = |index: usize| room.module_of.get(index).map(ModulePath::as_slice).unwrap_or_default();
    let below = |one: usize, other: usize| {
        module(one).split_last().is_some_and(|(_, parent)| parent == module(other))
    };
    let shown = |why: &BTreeMap<Need, BTreeSet<String>>| -> Vec<String> {
        let of = |need: Need, verb: &str| {
            let names = why.get(&need).into_iter().flatten();
            names.map(|name| format!("{verb} {name}")).collect::<Vec<String>>()
        };
        let all = [of(Need::Imports, "imports"), of(Need::Calls, "calls")].concat();
        all.into_iter().take(NAMES).collect()
    };
    let both = needs.iter().filter(|((one, other), _)| one < other);
    both.filter_map(|((one, other), why)| {
        let back = needs.get(&(*other, *one))?;
        Some(Pair {
            one: file(*one),
            other: file(*other),
            parent_and_child: below(*one, *other) || below(*other, *one),
            one_needs: shown(why),
            other_needs: shown(back),
        })
    })
    .collect()
}

/// Sets of files, each of which is reached from each other of its set by imports.
fn circles(room: &Room, needs: &Needs) -> Vec<Vec<PathBuf>> {
    let count = room.files.len();
    let mut edges = vec![BTreeSet::new(); count];
    for ((from, to), why) in needs {
        if why.contains_key(&Need::Imports)
            && let Some(edges) = edges.get_mut(*from)
        {
            edges.insert(*to);
        }
    }
    let reached: Vec<BTreeSet<usize>> = (0..count).map(|from| reached(&edges, from)).collect();
    let reaches = |from: usize, to: usize| reached.get(from).is_some_and(|reached| reached.contains(&to));
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for file in 0..count {
        if seen.contains(&file) {
            continue;
        }
        let circle: Vec<usize> =
            (file..count).filter(|other| reaches(file, *other) && reaches(*other, file)).collect();
        seen.extend(circle.iter().copied());
        if circle.len() > 2 {
            found.push(circle.iter().filter_map(|index| room.files.get(*index).cloned()).collect::<Vec<_>>());
        }
    }
    found.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
    found
}

/// What is reached from a file, itself where a way leads back.
fn reached(edges: &[BTreeSet<usize>], from: usize) -> BTreeSet<usize> {
    let (mut found, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(at) = open.pop() {
        let next = edges.get(at).into_iter().flatten();
        open.extend(next.filter(|to| found.insert(**to)));
    }
    found
}

fn stray_impls(room: &Room) -> Vec<StrayImpl> {
    let file = |index: usize| room.files.get(index).cloned().unwrap_or_default();
    let strays = room.impls.iter().filter_map(|block| {
        let key = room.implemented(block)?;
        // A conversion may stand with either of the types that it is between.
        let homes = [key.clone()].into_iter().chain(room.over(block));
        if homes.into_iter().any(|(module, _)| block.module.starts_with(&module)) {
            return None;
        }
        let defined = room.types.get(&key).map(|info| file(info.file)).unwrap_or_default();
        Some(StrayImpl { name: key.1, defined, file: file(block.file), line: block.line })
    });
    strays.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_testkit::workspace;
    use std::path::Path;

    /// A room of these files, below its `src`.
    fn findings(files: &[(&str, &str)]) -> Findings {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join("room/src").join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let folder = Path::new("room");
        Findings::of(folder.to_path_buf(), &Room::read(root.path(), folder).unwrap())
    }

    fn names(paths: &[PathBuf]) -> Vec<&str> {
        paths.iter().map(|path| path.file_stem().unwrap().to_str().unwrap()).collect()
    }

    fn pairs(files: &[(&str, &str)]) -> Vec<(String, String)> {
        let stem = |path: &Path| path.file_stem().unwrap().to_string_lossy().into_owned();
        findings(files).pairs.iter().map(|pair| (stem(&pair.one), stem(&pair.other))).collect()
    }

    #[test]
    fn controls_files_are_in_no_pair_or_circle() {
        let folder = Path::new("control/server");
        let found = Findings::of(folder.to_path_buf(), &Room::read(&workspace::root(), folder).unwrap());
        assert!(found.files > 50);
        assert_eq!((found.pairs, found.circles), (vec![], vec![]));
        let large: Vec<&TypeSize> = found.types.iter().filter(|found| found.flagged).collect();
        assert!(large.is_empty(), "{large:?}");
    }

    #[test]
    fn files_that_import_each_other_are_a_pair() {
        let lib = ("lib.rs", "mod a; mod b; mod c;");
        let a = ("a.rs", "use crate::b::{B, self as beta}; pub struct A;");
        let b = ("b.rs", "pub struct B; fn f() { super::a::A; }");
        let c = ("c.rs", "use crate::a::A;");
        assert_eq!(pairs(&[lib, a, b, c]), [("a".to_owned(), "b".to_owned())]);
        let found = findings(&[lib, a, b, c]);
        assert_eq!((found.files, found.pairs[0].parent_and_child), (4, false));
        assert_eq!(found.pairs[0].other_needs, ["imports A"]);
    }

    #[test]
    fn files_that_call_each_other_are_a_pair() {
        let lib = ("lib.rs", "pub struct S { t: T } pub struct T; mod a; mod b;");
        let a = ("a.rs", "impl super::S { fn a(&self) { self.b(); } fn x(&self) {} }");
        let b = ("b.rs", "use crate::S; impl S { fn b(&self) { self.x() } }");
        let found = findings(&[lib, a, b]);
        assert_eq!(found.pairs.len(), 1);
        assert_eq!(found.pairs[0].one_needs, ["calls S::b"]);
        assert_eq!(found.pairs[0].other_needs, ["calls S::x"]);
        // Through a field, and on a parameter.
        let a = ("a.rs", "impl super::S { fn a(&self) { self.t.b(); } pub fn x(&self) {} }");
        let b = ("b.rs", "use crate::{S, T}; impl T { fn b(&self) {} } fn g(s: &mut S) { s.x() }");
        assert_eq!(findings(&[lib, a, b]).pairs.len(), 1);
    }

    #[test]
    fn what_a_parent_exports_is_its_childs() {
        let lib = ("lib.rs", "mod a; mod b; pub use a::A;");
        let a = ("a.rs", "use crate::b::B; pub struct A;");
        let b = ("b.rs", "pub struct B;");
        assert_eq!(pairs(&[lib, a, b]), []);
        let b = ("b.rs", "use crate::A; pub struct B;");
        assert_eq!(pairs(&[lib, a, b]), [("a".to_owned(), "b".to_owned())]);
    }

    #[test]
    fn a_parent_and_its_child_are_named_so() {
        let lib = ("lib.rs", "mod a; pub struct L; fn f() { a::g() }");
        let found = findings(&[lib, ("a.rs", "use super::L; pub fn g() {}")]);
        assert!(found.pairs.len() == 1 && found.pairs[0].parent_and_child);
    }

    #[test]
    fn tests_are_left_out() {
        let lib = ("lib.rs", "mod a; #[cfg(test)] mod b;");
        let a = ("a.rs", "pub struct A; #[cfg(test)] mod tests { use crate::b::B; }");
        let found = findings(&[lib, a, ("b.rs", "use crate::a::A; pub struct B;")]);
        assert_eq!((found.files, found.pairs), (2, vec![]));
    }

    #[test]
    fn circles_are_of_three_or_more() {
        let lib = ("lib.rs", "mod a; mod b; mod c; mod d;");
        let of = |name: &'static str, to: &str| (name, format!("use crate::{to}::f; pub fn f() {{}}"));
        let made = [of("a.rs", "b"), of("b.rs", "c"), of("c.rs", "a"), of("d.rs", "a")];
        let mut files = vec![lib];
        files.extend(made.iter().map(|(name, text)| (*name, text.as_str())));
        let found = findings(&files);
        assert_eq!(found.circles.iter().map(|circle| names(circle)).collect::<Vec<_>>(), [["a", "b", "c"]]);
        assert_eq!(found.pairs, []);
        files.pop();
        files[2].1 = "pub fn f() {}";
        assert!(findings(&files).circles.is_empty());
    }

    #[test]
    fn impls_stay_below_their_types() {
        let lib = ("lib.rs", "mod a; mod b;");
        let a = ("a.rs", "mod inner; pub struct A; pub struct C;");
        let inner = ("a/inner.rs", "impl super::A {}");
        let strays = |b: &str| findings(&[lib, a, inner, ("b.rs", b)]).stray_impls;
        assert_eq!(strays("pub struct B; impl From<B> for crate::a::A {}"), []);
        assert_eq!(strays("impl std::fmt::Display for Other {}"), []);
        let found = strays("//! B.\nuse crate::a::A;\nimpl A {}\nimpl std::fmt::Display for A {}");
        assert_eq!(
            found.iter().map(|stray| (stray.name.as_str(), stray.line)).collect::<Vec<_>>(),
            [("A", 3), ("A", 4)]
        );
        assert_eq!(names(&[found[0].defined.clone(), found[0].file.clone()]), ["a", "b"]);
    }

    #[test]
    fn methods_and_fields_are_counted() {
        let methods = |count: usize| (0..count).map(|n| format!("fn f{n}(&self) {{}}")).collect::<String>();
        let lib =
            format!("mod a; struct S {{ x: u8, y: u8 }} enum E {{ A, B }} impl S {{ {} }}", methods(60));
        let found = |a: &str| findings(&[("lib.rs", &lib), ("a.rs", a)]).types.remove(0);
        let size = found("impl super::S { #[cfg(test)] fn g(&self) {} }");
        assert_eq!((size.name.as_str(), size.methods, size.method_files, size.flagged), ("S", 60, 1, false));
        let size = found("impl super::S { fn g(&self) {} }");
        assert_eq!((size.methods, size.method_files, size.fields, size.flagged), (61, 2, 2, true));
    }

    #[test]
    fn functions_have_lengths() {
        let lib =
            "fn one() {}\n/// Long.\nfn three(\n) {\n}\nstruct S;\nimpl S {\n    fn two() {\n    }\n}\n";
        let found = findings(&[("lib.rs", lib)]).functions;
        let lengths: Vec<(&str, usize, usize)> =
            found.iter().map(|found| (found.name.as_str(), found.line, found.lines)).collect();
        assert_eq!(lengths, [("one", 1, 1), ("three", 3, 3), ("S::two", 8, 2)]);
    }
}
