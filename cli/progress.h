/* SPDX-License-Identifier: MIT */
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H
/*
 * A bar on the terminal: what is going on, percent, rate, time left. It is drawn on stderr, only
 * where that is a terminal, at most ten times a second and not at all for what is over at once.
 * It leaves no trace: whoever prints next finds an empty line.
 */
#include <stdbool.h>
#include <stdint.h>

struct progress {
	bool wanted, drawn;
	const char *what;	/* "copying" */
	uint64_t total;
	double started, looked;	/* seconds of the clock: when begun, when last drawn */
	uint64_t seen;		/* bytes when last drawn */
	double rate;		/* bytes per second of late */
};

/* `wanted` is what the user says; the terminal has its say as well. */
void progress_init(struct progress *progress, bool wanted);

void progress_start(struct progress *progress, const char *what, uint64_t total);
void progress_show(struct progress *progress, uint64_t bytes);
void progress_end(struct progress *progress);

#endif
