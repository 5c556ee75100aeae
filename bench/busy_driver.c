/* SPDX-License-Identifier: MIT */
/*
 * Does a load suffer when another thread of the process asks the driver? Frameworks do: for free
 * memory, for a stream's state.
 *
 *   busy_driver FILE [DEVICE [ROUNDS]]
 *
 * Loads FILE from the page cache, taking turns between quiet and with a thread that calls
 * cuMemGetInfo every 20 ms, and tells the median of the rounds' ratios and how long a call takes.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>
#include "measure.h"
#include "mem/device.h"
#include "sys/cuda.h"

static struct pen_device *device;
static atomic_bool busy, ended;

static void *ask(void *unused)
{
	const struct cuda_api *api = cuda_open(NULL);
	size_t free_bytes, total;

	(void)unused;
	device_enter(device, NULL);
	while (!atomic_load(&ended)) {
		double start = now();

		if (atomic_load(&busy)) {
			api->cuMemGetInfo_v2(&free_bytes, &total);
			record("call", now() - start);
		}
		usleep(20000);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	int rounds = argc > 3 ? atoi(argv[3]) : 9, fd;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_extent all = { 0 };
	struct pen_error err;
	pthread_t thread;
	double quiet;

	if (argc < 2)
		die("usage: busy_driver FILE [DEVICE [ROUNDS]]");
	check(pen_device_open(argc > 2 ? argv[2] : "cuda:0", &device, &err), &err);
	check(pen_device_ready(device, &err), &err);
	check(pen_object_open(argv[1], PEN_READ, 0, &all.object, &err), &err);
	all.length = pen_object_size(all.object);
	check(pen_device_alloc(device, all.length, &all.memory, &err), &err);
	fd = open(argv[1], O_RDONLY | O_CLOEXEC);
	make_warm(fd, all.length);
	pthread_create(&thread, NULL, ask, NULL);
	check(pen_transfer(PEN_READ, device, &all, 1, NULL, &report, &err), &err);
	for (int round = 0; round < rounds; round++) {
		check(pen_transfer(PEN_READ, device, &all, 1, NULL, &report, &err), &err);
		quiet = report.seconds;
		record("quiet", quiet);
		record("cpu", report.cpu_seconds);
		atomic_store(&busy, true);
		check(pen_transfer(PEN_READ, device, &all, 1, NULL, &report, &err), &err);
		atomic_store(&busy, false);
		record("ratio", report.seconds / quiet);
	}
	atomic_store(&ended, true);
	pthread_join(thread, NULL);
	printf("quiet %.4f s (%.1f GB/s, %.2f CPU-s), busy %.3f x that; a call takes %.2f ms\n",
	       median_of("quiet"), gb_per_s(all.length, median_of("quiet")), median_of("cpu"),
	       median_of("ratio"), median_of("call") * 1e3);
	close(fd);
	check(pen_device_free(device, all.memory, all.length, &err), &err);
	pen_object_close(all.object);
	pen_device_close(device);
	return 0;
}
