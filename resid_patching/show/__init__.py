"""How results are shown: one neutral form, written once as text and once as a page.

    report = Document("Ablation, gpt2", sections=(section(effect, top=15),), origin=...)
    print_report(console(), report)        a terminal or a pipe      (text)
    page_of(report, flags).html()          one HTML file             (html)

A result says what is shown of it (`Result.table`, `facts`, `caveats`, `pictures`). Only the grids
of heads and of lenses depend on the kind of result.
"""
