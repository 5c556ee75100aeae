/* SPDX-License-Identifier: MIT */
/* Signals that ask for an orderly end; see interrupt.h. */
#include <signal.h>
#include <stddef.h>
#include <unistd.h>
#include "interrupt.h"

static volatile sig_atomic_t came;
static const char *volatile litter;

/* Only calls that a handler may make. */
static void note(int number)
{
	if (came == number && number != SIGHUP) {
		if (litter)
			rmdir(litter);
		signal(number, SIG_DFL);
		raise(number);
	}
	came = number;
}

static void watch(int number)
{
	struct sigaction action = { .sa_handler = note, .sa_flags = SA_RESTART };
	struct sigaction before;

	/* Whoever started us with the signal ignored (nohup, a shell's background) meant it. */
	if (!sigaction(number, NULL, &before) && before.sa_handler != SIG_IGN)
		sigaction(number, &action, NULL);
}

void interrupt_init(void)
{
	watch(SIGINT);
	watch(SIGTERM);
	watch(SIGHUP);
	/* A limit of file size is an error of the write, told like any other. */
	signal(SIGXFSZ, SIG_IGN);
}

void interrupt_litter(const char *folder)
{
	litter = folder;
}

int interrupt_signal(void)
{
	return came;
}
