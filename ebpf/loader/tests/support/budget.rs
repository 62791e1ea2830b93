//! The verifier's budget, which every program that is loaded has to keep.

use harmonaize_loader::Programs;
use toml::Table;

/// Fails where a program has no budget, or the verifier went through more instructions. Those for diagnosis have budgets of their own.
pub(crate) fn check_budget(programs: &Programs, diagnosis: bool) {
    let budget: Table = include_str!("../../../objects/budget.toml").parse().unwrap();
    let most = |table: &str, name: &str| budget.get(table)?.get(name)?.as_integer();
    for program in programs.cost().unwrap().programs {
        let name = &*program.name;
        let own = if diagnosis { most("diagnosis", name) } else { None };
        let most = own.or_else(|| most("verified", name));
        let most = most.unwrap_or_else(|| panic!("objects/budget.toml has no line for {name}"));
        match program.verified {
            Some(verified) => {
                eprintln!("{name}: {verified} of {most} instructions");
                assert!(i64::from(verified) <= most, "{name}: {verified} of {most}");
            }
            None => harmonaize_testkit::strict::skip_test(
                "this kernel does not say how many instructions it verified",
            ),
        }
    }
}
