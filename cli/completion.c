/* SPDX-License-Identifier: MIT */
/*
 * penstock completion: a script for bash, zsh or fish that completes commands, options and their
 * values. It is written from the same tables that options are parsed by, so it knows them all; for
 * operands, and where a value is a file, the shell completes names of files.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include "base/error.h"
#include "commands.h"
#include "report.h"

static const struct option_entry completion_options[] = {
	{ "help", 'h', OPTION_HELP, .help = "Show this" },
	{ .name = NULL },
};

static const char *const shells[] = { "bash", "zsh", "fish", NULL };

static bool takes_value(const struct option_entry *option)
{
	return option->kind != OPTION_FLAG && option->kind != OPTION_HELP;
}

/* Print with a backslash before each character that is in `special`. */
static void print_quoted(const char *text, const char *special)
{
	for (; *text; text++)
		printf("%s%c", strchr(special, *text) ? "\\" : "", *text);
}

/* Words with spaces between; those in `special` are quoted. */
static void print_words(const char *const *words, const char *special)
{
	for (size_t i = 0; words[i]; i++) {
		printf("%s", i ? " " : "");
		print_quoted(words[i], special);
	}
}

/* The values that an option can have, or nothing where they cannot be counted. */
static void print_values(const struct option_entry *option, const char *special)
{
	static const char *const devices[] = { "host", "cuda:0", NULL };

	if (option->choices)
		print_words(option->choices, special);
	else if (option->kind == OPTION_DEVICE)
		print_words(devices, special);
	for (int type = 0; option->kind == OPTION_TRANSFER && pen_transfer_name(type); type++)
		printf("%s%s", type ? " " : "", pen_transfer_name(type));
}

static void print_names(void)
{
	for (size_t i = 0; commands[i]; i++)
		printf("%s ", commands[i]->name);
}

static void print_head(const char *shell)
{
	printf("# %s completion of penstock %s, as 'penstock completion %s' prints it.\n", shell,
	       pen_version(), shell);
}

/* ----------------------------------------------------------------------------------- bash -- */

static void bash_command(const struct command *command)
{
	printf("\t%s)\n\t\toptions='", command->name);
	for (const struct option_entry *option = command->options; option->name; option++) {
		printf("--%s ", option->name);
		if (option->letter)
			printf("-%c ", option->letter);
	}
	printf("'\n");
	if (command->operand_choices) {
		printf("\t\toperands='");
		print_words(command->operand_choices, "");
		printf("'\n");
	}
	if (command->first_choices) {
		printf("\t\tif ((COMP_CWORD == 2)); then operands='");
		print_words(command->first_choices, "");
		printf("'; fi\n");
	}
	printf("\t\tcase $before in\n");
	for (const struct option_entry *option = command->options; option->name; option++) {
		if (!takes_value(option))
			continue;
		printf("\t\t--%s", option->name);
		if (option->letter)
			printf(" | -%c", option->letter);
		printf(") value=yes operands='");
		print_values(option, "");
		printf("' ;;\n");
	}
	printf("\t\tesac\n\t\t;;\n");
}

/* Bash takes "--cache=keep" for three words. Where nothing is said of an operand it is a file; a
 * value that cannot be listed is not completed at all. */
static void print_bash(void)
{
	print_head("bash");
	printf("_penstock()\n{\n"
	       "\tlocal word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}\n"
	       "\tlocal options= operands= value=\n\n"
	       "\tCOMPREPLY=()\n"
	       "\t[[ $word == = ]] && word=\n"
	       "\t[[ $before == = ]] && before=${COMP_WORDS[COMP_CWORD - 2]}\n"
	       "\tif ((COMP_CWORD == 1)); then\n"
	       "\t\tCOMPREPLY=($(compgen -W '");
	print_names();
	printf("help --help --version' -- \"$word\"))\n\t\treturn\n\tfi\n"
	       "\tcase ${COMP_WORDS[1]} in\n");
	for (size_t i = 0; commands[i]; i++)
		bash_command(commands[i]);
	printf("\thelp)\n\t\toperands='");
	print_names();
	printf("'\n\t\t;;\n\tesac\n"
	       "\tif [[ $word == -* && ! $value ]]; then\n"
	       "\t\tCOMPREPLY=($(compgen -W \"$options\" -- \"$word\"))\n"
	       "\telif [[ $operands ]]; then\n"
	       "\t\tCOMPREPLY=($(compgen -W \"$operands\" -- \"$word\"))\n"
	       "\telif [[ ! $value ]]; then\n"
	       "\t\tcompopt -o default\n"
	       "\tfi\n"
	       "}\n"
	       "complete -F _penstock penstock\n");
}

/* ------------------------------------------------------------------------------------ zsh -- */

static void zsh_option(const struct option_entry *option)
{
	const char *repeated = option->kind == OPTION_LIST ? "*" : "";

	printf(" \\\n\t\t\t");
	if (option->letter && !takes_value(option))
		printf("'(-%c --%s)'{-%c,--%s}'[", option->letter, option->name, option->letter,
		       option->name);
	else if (option->letter && !repeated[0])
		printf("'(-%c --%s)'{-%c+,--%s=}'[", option->letter, option->name, option->letter,
		       option->name);
	else if (option->letter)
		printf("'*'{-%c+,--%s=}'[", option->letter, option->name);
	else
		printf("'%s--%s%s[", repeated, option->name, takes_value(option) ? "=" : "");
	/* A quote ends the quoting, stands for itself, and begins it again. */
	for (const char *at = option->help; *at; at++) {
		if (*at == '\'')
			printf("'\\''");
		else
			printf("%s%c", strchr("[]\\", *at) ? "\\" : "", *at);
	}
	printf("]");
	if (takes_value(option)) {
		printf(":%s:(", option->argument ? option->argument : "value");
		print_values(option, ":");
		printf(")");
	}
	printf("'");
}

static void print_zsh(void)
{
	printf("#compdef penstock\n");
	print_head("zsh");
	printf("_penstock() {\n\tlocal -a commands=(\n");
	for (size_t i = 0; commands[i]; i++)
		printf("\t\t'%s:%s'\n", commands[i]->name, commands[i]->summary);
	printf("\t\t'help:show help, of a command where one is named'\n\t)\n\n"
	       "\tif ((CURRENT == 2)); then\n"
	       "\t\t_describe command commands\n\t\treturn\n\tfi\n"
	       "\tshift words\n\t((CURRENT--))\n"
	       "\tcase $words[1] in\n");
	for (size_t i = 0; commands[i]; i++) {
		printf("\t%s)\n\t\t_arguments -s -S", commands[i]->name);
		for (const struct option_entry *option = commands[i]->options; option->name;
		     option++)
			zsh_option(option);
		if (commands[i]->first_choices) {
			printf(" \\\n\t\t\t'1:%s:(", commands[i]->operands);
			print_words(commands[i]->first_choices, "");
			printf(")'");
		}
		printf(" \\\n\t\t\t'*:%s:", commands[i]->operands);
		if (commands[i]->operand_choices) {
			printf("(");
			print_words(commands[i]->operand_choices, "");
			printf(")'\n\t\t;;\n");
		} else {
			printf("_files'\n\t\t;;\n");
		}
	}
	printf("\thelp)\n\t\t_describe command commands\n\t\t;;\n\tesac\n}\n"
	       "if [ \"$funcstack[1]\" = _penstock ]; then\n\t_penstock \"$@\"\n"
	       "else\n\tcompdef _penstock penstock\nfi\n");
}

/* ----------------------------------------------------------------------------------- fish -- */

static void fish_option(const struct command *command, const struct option_entry *option)
{
	printf("complete -c penstock -n '__fish_seen_subcommand_from %s' -l %s", command->name,
	       option->name);
	if (option->letter)
		printf(" -s %c", option->letter);
	if (takes_value(option)) {
		printf(" -x -a '");
		print_values(option, "");
		printf("'");
	}
	printf(" -d '");
	print_quoted(option->help, "'\\");
	printf("'\n");
}

/* First one of the choices, then files. */
static void fish_first(const struct command *command)
{
	printf("complete -c penstock -n '__fish_seen_subcommand_from %s; and not "
	       "__fish_seen_subcommand_from ", command->name);
	print_words(command->first_choices, "");
	printf("' -a '");
	print_words(command->first_choices, "");
	printf("'\ncomplete -c penstock -n '__fish_seen_subcommand_from %s; and "
	       "__fish_seen_subcommand_from ", command->name);
	print_words(command->first_choices, "");
	printf("' -F\n");
}

static void print_fish(void)
{
	print_head("fish");
	printf("complete -c penstock -f\n");
	for (size_t i = 0; commands[i]; i++) {
		const struct command *command = commands[i];

		printf("complete -c penstock -n __fish_use_subcommand -a %s -d '%s'\n",
		       command->name, command->summary);
		for (const struct option_entry *option = command->options; option->name; option++)
			fish_option(command, option);
		if (command->first_choices) {
			fish_first(command);
			continue;
		}
		printf("complete -c penstock -n '__fish_seen_subcommand_from %s' ", command->name);
		if (command->operand_choices) {
			printf("-a '");
			print_words(command->operand_choices, "");
			printf("'\n");
		} else {
			printf("-F\n");
		}
	}
	printf("complete -c penstock -n __fish_use_subcommand -a help -d 'show help'\n"
	       "complete -c penstock -n '__fish_seen_subcommand_from help' -a '");
	print_names();
	printf("'\n");
}

/* ---------------------------------------------------------------------------- the command -- */

static int run_completion(int argc, char **argv)
{
	static void (*const print[])(void) = { print_bash, print_zsh, print_fish };
	struct pen_error err;
	int rc = options_parse(&command_completion, argc, argv, NULL, &err);

	if (rc > 0)
		return STATUS_OK;
	for (size_t i = 0; !rc && shells[i]; i++) {
		if (!strcmp(argv[0], shells[i])) {
			print[i]();
			return STATUS_OK;
		}
	}
	if (!rc) {
		error_set(&err, -EINVAL, "complete for", argv[0], -1, "it is no shell known here");
		error_hint(&err, "Shells are bash, zsh and fish");
	}
	report_error(&err, false);
	return STATUS_USAGE;
}

const struct command command_completion = {
	.name = "completion",
	.operands = "SHELL",
	.operand_count = 1,
	.operand_choices = shells,
	.summary = "print the completion of commands and options for a shell",
	.description = "Print a script that makes SHELL - bash, zsh or fish - complete the "
		       "commands and options of penstock. 'make install' installs all three.",
	.options = completion_options,
	.run = run_completion,
};
