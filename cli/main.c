/* SPDX-License-Identifier: MIT */
/*
 * penstock: the command line. The first argument names a command, the rest is the command's own.
 * Status: 0 done, 1 failed, 2 called wrongly, 128 + n ended by signal n.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include "base/error.h"
#include "commands.h"
#include "report.h"

const struct command *const commands[] = {
	&command_load, &command_inspect, &command_verify, &command_ckpt, &command_copy,
	&command_explain, &command_pack, &command_unpack, &command_make_model, &command_completion,
	NULL,
};

#define COMMANDS (sizeof(commands) / sizeof(commands[0]) - 1)

static const struct command *find_command(const char *name)
{
	for (size_t i = 0; i < COMMANDS; i++)
		if (!strcmp(name, commands[i]->name))
			return commands[i];
	return NULL;
}

static void print_usage(FILE *to)
{
	fprintf(to, "Usage: penstock COMMAND [OPTIONS] ...\n\n"
		    "Move bytes between storage and GPU memory by the fastest path there is.\n\n"
		    "Commands:\n");
	for (size_t i = 0; i < COMMANDS; i++)
		fprintf(to, "  %-10s %s\n", commands[i]->name, commands[i]->summary);
	fprintf(to, "  %-10s show help, of a COMMAND where one is named\n\n"
		    "'penstock COMMAND --help' lists the options of a command;\n"
		    "'penstock --version' says which version this is.\n", "help");
}

static int unknown_command(const char *name)
{
	const char *names[COMMANDS + 2] = { "help" };
	const char *near;
	struct pen_error err;

	for (size_t i = 0; i < COMMANDS; i++)
		names[i + 1] = commands[i]->name;
	near = options_nearest(name, names, sizeof(names[0]));
	error_set(&err, -EINVAL, "run", name, -1, "there is no such command");
	if (near)
		error_hint(&err, "Did you mean 'penstock %s'?", near);
	else
		error_hint(&err, "'penstock help' lists the commands");
	report_error(&err, false);
	return STATUS_USAGE;
}

static int run_help(int argc, char **argv)
{
	char help[] = "--help", *arguments[] = { help, NULL };
	const struct command *command;

	if (!argc) {
		print_usage(stdout);
		return STATUS_OK;
	}
	command = find_command(argv[0]);
	return command ? command->run(1, arguments) : unknown_command(argv[0]);
}

static bool is_one_of(const char *word, const char *letter, const char *name)
{
	return !strcmp(word, letter) || !strcmp(word, name) || !strcmp(word, name + 2);
}

static int dispatch(int argc, char **argv)
{
	const struct command *command;

	if (argc < 2) {
		print_usage(stderr);
		return STATUS_USAGE;
	}
	if (is_one_of(argv[1], "-h", "--help"))
		return run_help(argc - 2, argv + 2);
	if (is_one_of(argv[1], "-V", "--version")) {
		printf("penstock %s\n", pen_version());
		return STATUS_OK;
	}
	command = find_command(argv[1]);
	return command ? command->run(argc - 2, argv + 2) : unknown_command(argv[1]);
}

/*
 * Where a standard descriptor is closed, the next file opened would take its number, and a message
 * would be written into it. What stands in cannot do what the number is for: output that nobody
 * gets stays an error.
 */
static bool fill_standard_descriptors(void)
{
	for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
		if (fcntl(fd, F_GETFD) < 0 &&
		    open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd)
			return false;
	return true;
}

/* A model may have more files than the usual limit of 1024, and each takes two descriptors. */
static void allow_many_files(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit))
		return;
	limit.rlim_cur = limit.rlim_max;
	setrlimit(RLIMIT_NOFILE, &limit);
}

int main(int argc, char **argv)
{
	int status;

	if (!fill_standard_descriptors())
		return STATUS_FAILURE;
	allow_many_files();
	status = dispatch(argc, argv);

	/* A report that did not reach its reader is a failure, too. */
	if ((fflush(stdout) || ferror(stdout)) && !status) {
		fprintf(stderr, "penstock: cannot write the output: %s\n", strerror(errno));
		status = STATUS_FAILURE;
	}
	return status;
}
