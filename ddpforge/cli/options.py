"""Options and arguments that several commands share."""

import click

recipe_argument = click.argument("recipe", metavar="RECIPE")
sets_option = click.option(
    "-s", "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a value, e.g. train.seed=1; repeatable."
)
out_option = click.option(
    "-o", "--out", type=click.Path(file_okay=False), help="Put the run's folder here instead of the recipe's output_dir."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
