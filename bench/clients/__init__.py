"""Programs that use Opacus, run as they are: once with Opacus, once with `python -m fastclip.opacus`.

Programs of packages are imported and called; scripts that exist only in repositories are written
anew with
the same structure and calls. Data are generated in the shapes of the original ones.

    make clients                                   # an environment of its own, all programs, the table
    python -m bench.clients mnist flower           # these two
    python -m bench.clients.table FILE.json        # the table of docs/clients.md
"""
