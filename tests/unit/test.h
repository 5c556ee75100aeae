/* SPDX-License-Identifier: MIT */
#ifndef TEST_H
#define TEST_H
/*
 * The smallest harness that serves: TEST(name) { ... } defines a case, TEST_MAIN runs them.
 * `program --list` prints the names, `program NAME` runs one, `program` runs all. Each case runs
 * in a process of its own with a time limit, so a crash or a hang is one failed case and names
 * itself. Exit 0 passed, 1 failed, 77 skipped (the reason is printed).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define TEST_SKIPPED 77
#define TEST_SECONDS 120

/* Under a sanitizer the program is too slow for what it says about speed. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TEST_SLOW_BUILD 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TEST_SLOW_BUILD 1
#endif
#endif
#ifndef TEST_SLOW_BUILD
#define TEST_SLOW_BUILD 0
#endif

struct test_case {
	const char *name;
	void (*run)(void);
	struct test_case *next;
};

static struct test_case *test_first, **test_last = &test_first;

#define TEST(name)                                                             \
	static void test_##name(void);                                         \
	__attribute__((constructor)) static void test_add_##name(void)         \
	{                                                                      \
		static struct test_case self = { #name, test_##name, NULL };   \
		*test_last = &self;                                            \
		test_last = &self.next;                                        \
	}                                                                      \
	static void test_##name(void)

/* A case that measures time, memory or the page cache: tests/conftest.py runs nothing beside it. */
#define TEST_ALONE(name) TEST(name)
/* A case that takes more than some seconds: `make check` leaves it out. */
#define TEST_SLOW(name) TEST(name)

#define CHECK(condition)                                                       \
	do {                                                                   \
		if (!(condition)) {                                            \
			fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, \
				#condition);                                   \
			exit(1);                                               \
		}                                                              \
	} while (0)

#define CHECK_EQ(left, right)                                                  \
	do {                                                                   \
		long long test_left = (long long)(left), test_right = (long long)(right); \
		if (test_left != test_right) {                                 \
			fprintf(stderr, "%s:%d: %s is %lld, not %lld (%s)\n", __FILE__, \
				__LINE__, #left, test_left, test_right, #right); \
			exit(1);                                               \
		}                                                              \
	} while (0)

#define CHECK_TEXT(left, right)                                                \
	do {                                                                   \
		const char *test_left = (left), *test_right = (right);         \
		if (strcmp(test_left, test_right)) {                           \
			fprintf(stderr, "%s:%d: %s is \"%s\", not \"%s\"\n", __FILE__, \
				__LINE__, #left, test_left, test_right);       \
			exit(1);                                               \
		}                                                              \
	} while (0)

#define SKIP(reason)                                                           \
	do {                                                                   \
		printf("skipped: %s\n", reason);                               \
		exit(TEST_SKIPPED);                                            \
	} while (0)

static int test_run(struct test_case *test)
{
	int status;
	pid_t child;

	fflush(stdout);
	child = fork();
	if (!child) {
		alarm(TEST_SECONDS);
		test->run();
		exit(0);
	}
	waitpid(child, &status, 0);
	if (WIFSIGNALED(status))
		fprintf(stderr, "%s: killed by signal %d%s\n", test->name, WTERMSIG(status),
			WTERMSIG(status) == SIGALRM ? " (it hung)" : "");
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

/* The process that only waits for its cases has nothing that could leak, and where a sanitizer
 * looks for leaks at exit that can take seconds. */
static void test_end(int status)
{
	fflush(stdout);
	_exit(status);
}

#define TEST_MAIN                                                              \
	int main(int argc, char **argv)                                        \
	{                                                                      \
		int bad_cases = 0;                                             \
		bool found = argc < 2;                                         \
		for (struct test_case *t = test_first; t; t = t->next) {       \
			if (argc > 1 && !strcmp(argv[1], "--list")) {          \
				puts(t->name);                                 \
				found = true;                                  \
				continue;                                      \
			}                                                      \
			if (argc > 1 && strcmp(argv[1], t->name))              \
				continue;                                      \
			found = true;                                          \
			int rc = test_run(t);                                  \
			if (argc > 1)                                          \
				test_end(rc);                                  \
			printf("%s %s\n", rc == 0 ? "pass" : rc == TEST_SKIPPED ? "skip" : "FAIL", \
			       t->name);                                       \
			bad_cases |= rc != 0 && rc != TEST_SKIPPED;            \
		}                                                              \
		test_end(bad_cases || !found);                                 \
	}

#include <signal.h>
#include <stdbool.h>

#endif
