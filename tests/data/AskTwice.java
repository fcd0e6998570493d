import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Posts a body twice with the client of Java, which offers HTTP/2: arguments are a URL and the body. */
class AskTwice {
  public static void main(String[] arguments) throws Exception {
    HttpClient client = HttpClient.newHttpClient();
    HttpRequest request =
        HttpRequest.newBuilder(URI.create(arguments[0]))
            .header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(arguments[1]))
            .build();
    for (int i = 0; i < 2; i++) {
      HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
      System.out.println(answer.statusCode() + " " + answer.version() + " " + answer.body().length());
    }
  }
}
