/* SPDX-License-Identifier: MIT */
/* What a job tells about itself: the paths that carried bytes and why, those that could not. */
#include <errno.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "engine/job.h"

/* When there is no room for one more reason: any of the path, or the last. */
static struct tally *tally_of_path(struct pen_job *job, const char *path)
{
	for (unsigned int i = 0; i < job->tally_count; i++)
		if (!strcmp(job->tallies[i].path, path))
			return &job->tallies[i];
	return &job->tallies[job->tally_count - 1];
}

struct tally *job_tally(struct pen_job *job, const char *path, const char *reason)
{
	struct tally *tally = NULL;

	pthread_mutex_lock(&job->lock);
	for (unsigned int i = 0; i < job->tally_count && !tally; i++)
		if (!strcmp(job->tallies[i].path, path) && !strcmp(job->tallies[i].reason, reason))
			tally = &job->tallies[i];
	if (!tally) {
		/* Each lane may have had its own reason to step down: there is room for some. */
		if (job->tally_count == PEN_PATHS_MAX) {
			tally = tally_of_path(job, path);
			goto out;
		}
		tally = &job->tallies[job->tally_count++];
		text_copy(tally->path, sizeof(tally->path), path);
		text_copy(tally->reason, sizeof(tally->reason), reason);
	}
out:
	pthread_mutex_unlock(&job->lock);
	return tally;
}

void job_refused(struct pen_job *job, const char *path, const struct pen_error *why)
{
	pthread_mutex_lock(&job->lock);
	for (uint32_t i = 0; i < job->refused_count; i++)
		if (!strcmp(job->refused[i].path, path))
			goto out;
	if (job->refused_count < PEN_PATHS_MAX) {
		struct pen_path *entry = &job->refused[job->refused_count++];
		char text[sizeof(why->message) + sizeof(why->hint) + 4];

		text_copy(entry->path, sizeof(entry->path), path);
		strcpy(text, why->message);
		if (why->hint[0]) {
			strcat(text, ". ");
			strcat(text, why->hint);
		}
		text_copy(entry->reason, sizeof(entry->reason), text);
	}
out:
	pthread_mutex_unlock(&job->lock);
}

uint64_t job_bytes(struct pen_job *job)
{
	uint64_t bytes = 0;

	for (unsigned int i = 0; i < job->lane_count; i++)
		bytes += atomic_load_explicit(&job->lanes[i].bytes, memory_order_relaxed);
	return bytes;
}

int job_report_check(const struct pen_report *report, struct pen_error *err)
{
	error_clear(err);
	if (!report || report->size)
		return 0;
	error_set(err, -EINVAL, "fill in", "the report", -1, "its size is not set");
	error_hint(err, "Begin with struct pen_report report = PEN_REPORT_INIT");
	return -EINVAL;
}

void job_report(struct pen_job *job, struct pen_report *report)
{
	struct pen_report full = { .size = sizeof(full) };
	size_t size = report->size < sizeof(full) ? report->size : sizeof(full);
	struct tuner_setting setting = job->tuner.base;
	struct hist *latency = &job->lanes[0].latency;
	uint64_t end = job->end_ns, ready = job->ready_ns ? job->ready_ns : end;
	uint64_t cpu = 0;

	for (unsigned int i = 0; i < job->lane_count; i++) {
		struct lane *lane = &job->lanes[i];

		full.lanes += lane->requests != 0;
		full.requests += lane->requests;
		full.retries += lane->retries;
		full.storage_bytes += lane->storage_bytes;
		full.digested_bytes += lane->digested_bytes;
		full.unverified_bytes += lane->unverified_bytes;
		full.delivered_bytes += lane->delivered_bytes;
		full.coded_bytes += lane->coded_bytes;
		full.decode_seconds += (double)lane->decode_ns / 1e9;
		full.core_decoded_bytes += lane->core_decoded_bytes;
		cpu += lane->cpu_ns;
		if (i)
			hist_merge(latency, &lane->latency);
	}
	full.bytes = job_bytes(job);
	full.seconds = (double)(end - job->start_ns) / 1e9;
	full.setup_seconds = (double)(ready - job->start_ns) / 1e9;
	full.gb_per_s = full.seconds > 0 ? (double)full.bytes / full.seconds / 1e9 : 0;
	full.cpu_seconds = (double)cpu / 1e9;
	full.pinned_bytes = job->budget.peak_bytes;
	text_copy(full.device, sizeof(full.device), job->device->name);
	/* A path that is not tuned has one size. */
	if (!setting.size && job->schedule->path_count)
		setting.size = job->schedule->paths[0].size;
	full.request_size = setting.size;
	full.depth = setting.depth;
	full.latency_us_p50 = (double)hist_quantile(latency, 0.50) / 1e3;
	full.latency_us_p95 = (double)hist_quantile(latency, 0.95) / 1e3;
	full.latency_us_p99 = (double)hist_quantile(latency, 0.99) / 1e3;
	full.latency_us_max = (double)latency->max / 1e3;
	for (unsigned int i = 0; i < job->tally_count; i++) {
		struct pen_path *entry = &full.paths[full.path_count];

		if (!job->tallies[i].bytes)
			continue;
		text_copy(entry->path, sizeof(entry->path), job->tallies[i].path);
		text_copy(entry->reason, sizeof(entry->reason), job->tallies[i].reason);
		entry->bytes = job->tallies[i].bytes;
		full.path_count++;
	}
	if (job->direction != PEN_READ)
		full.stored_seconds = full.seconds;
	if (job->gathered.complete_ns)
		full.gathered_seconds = (double)(job->gathered.complete_ns - job->start_ns) / 1e9;
	if (job->gathered.count)
		full.gathering = job->streamed ? PEN_GATHERING_STREAMED : PEN_GATHERING_AHEAD;
	full.made_bytes = job->budget.made_bytes;
	full.warming_bytes = job->warming_bytes;
	text_copy(full.cache_reason, sizeof(full.cache_reason), job->cache_reason);
	full.refused_count = job->refused_count;
	memcpy(full.refused, job->refused, sizeof(full.refused));
	memcpy(report, &full, size);
	report->size = size;
}
