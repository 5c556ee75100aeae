/* SPDX-License-Identifier: MIT */
/* The progress bar; see progress.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include "progress.h"
#include "seconds.h"

#define INTERVAL 0.1	/* seconds between two drawings, and before the first */

static size_t terminal_width(void)
{
	struct winsize window;

	if (ioctl(STDERR_FILENO, TIOCGWINSZ, &window) || !window.ws_col)
		return 80;
	return window.ws_col;
}

void progress_init(struct progress *progress, bool wanted)
{
	const char *terminal = getenv("TERM");
	bool dumb = terminal && !strcmp(terminal, "dumb");

	*progress = (struct progress){ .wanted = wanted && !dumb && isatty(STDERR_FILENO) };
}

void progress_start(struct progress *progress, const char *what, uint64_t total)
{
	progress_end(progress);
	progress->what = what;
	progress->total = total;
	progress->started = progress->looked = seconds_now();
	progress->seen = 0;
	progress->rate = 0;
}

static void draw(struct progress *progress, uint64_t bytes)
{
	double share = progress->total ? (double)bytes / (double)progress->total : 1;
	double left = (double)(progress->total - bytes) / progress->rate;
	char before[48], after[64], bar[64] = "", time_left[24] = "", line[200];

	if (progress->rate > 0 && left < 360000)
		snprintf(time_left, sizeof(time_left), "%d:%02d left", (int)left / 60,
			 (int)left % 60);
	snprintf(before, sizeof(before), "%-9s %3.0f %%  ", progress->what, share * 100);
	snprintf(after, sizeof(after), "%.2f GB/s  %s", progress->rate / 1e9, time_left);

	/* The bar takes what the words leave, and gives way to them on a narrow terminal. The
	 * last column stays free: some terminals break the line there. */
	size_t width = terminal_width(), words = strlen(before) + strlen(after) + 3;
	size_t room = width > words ? width - words : 0;

	if (room >= sizeof(bar) - 2)
		room = sizeof(bar) - 3;
	if (room >= 8) {
		memset(bar, '.', room);
		memset(bar, '=', (size_t)(share * (double)room));
		strcpy(bar + room, "  ");
	}
	snprintf(line, sizeof(line), "%s%s%s", before, bar, after);
	fprintf(stderr, "\r\033[K%.*s", (int)width - 1, line);
	fflush(stderr);
	progress->drawn = true;
}

void progress_show(struct progress *progress, uint64_t bytes)
{
	double moment, since;

	if (!progress->wanted)
		return;
	moment = seconds_now();
	since = moment - progress->looked;
	if (since < INTERVAL || bytes > progress->total)
		return;

	/* Smoothed over about a second: steady enough to read, quick enough to show a stall. */
	double rate = (double)(bytes - progress->seen) / since;
	double weight = progress->drawn ? 0.2 : 1;

	progress->rate += weight * (rate - progress->rate);
	progress->looked = moment;
	progress->seen = bytes;
	draw(progress, bytes);
}

void progress_end(struct progress *progress)
{
	if (progress->drawn)
		fputs("\r\033[K", stderr);
	progress->drawn = false;
}
